"""A script as a worker runs it."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.worker.ranks import run_ranks

from keepstep.worker.process.bootstrap import run_script

SCRIPT = """
import builtins, sys, weakref

class Thing: pass

thing = Thing()
builtins.thing_of_the_script = weakref.ref(thing)
{ending}
"""


def running(_rank: int, _size: int, script: Path) -> Any:
    code = run_script((str(script),), module=False)
    gc.collect()
    return code, sys.modules["builtins"].thing_of_the_script() is not None


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('its own')", 1)], ids=["end", "exit", "error"]
)
def test_what_a_script_leaves_behind_stays_until_its_process_ends(ending: str, code: int, tmp_path: Path) -> None:
    """As under plain Python. A DDP that goes while torch's threads run may hang."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    assert run_ranks(1, running, script) == [(code, True)]
