"""Without the extra `cluster`, each command of several nodes says in one sentence what to install."""

import json
import subprocess
import sys

import pytest

from keepstep.cli.main import COMMANDS

COMMANDS_OF_SEVERAL = sorted(name for name, (place, _text) in COMMANDS.items() if place.startswith("cluster."))
CALLS = [
    *([name] for name in COMMANDS_OF_SEVERAL),
    ["run", "--nnodes", "2", "a.py"],
    ["run", "--engine", "ray", "a.py"],
]
PROGRAM = """import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from keepstep.cli.main import main
print([main(arguments) for arguments in json.loads(sys.argv[2])])
"""


@pytest.mark.parametrize(
    ("blocked", "calls"), [(["grpc", "cryptography"], CALLS), (["cryptography"], [["token"]]), (["grpc"], [["agent"]])]
)
def test_what_is_missing_is_named(blocked: list[str], calls: list[list[str]]) -> None:
    words = [sys.executable, "-c", PROGRAM, json.dumps(blocked), json.dumps(calls)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert COMMANDS_OF_SEVERAL == ["agent", "controller", "token", "weights"]
    sentence = f"several nodes: {', '.join(blocked)} is missing: pip install 'keepstep[cluster]'"
    assert ended.stderr.splitlines() == [f"keepstep {call[0]}: {sentence}" for call in calls]
    assert ended.stdout == f"{[2] * len(calls)}\n"
