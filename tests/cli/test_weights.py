"""``keepstep weights``: flags that do not fit together, and a server that does not know where the job is."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.jobs import IGNORED, IGNORING, command, handles, ignored_by

from keepstep.cli.cluster import weights
from keepstep.cli.main import main
from keepstep.config import SECRET_VARIABLE
from keepstep.trust.tokens import Secret

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["receive", "w"], "one of --from and --job"),
        (["receive", "w", "--from", "a:1", "--job", "b:2"], "one of --from and --job"),
        (["receive", "w", "--job", "b:0"], "--job b:0: must be HOST:PORT"),
        (["serve", "w", "--listen", "127.0.0.1:0", "--job", "b:2", "--peer", "c:3"], "leave one of --peer and --job"),
        (["serve", "w", "--listen", "127.0.0.1:0", "--peer", "c"], "address 'c': must be HOST:PORT"),
        (["serve", "w", "--listen", "0.0.0.0:0", "--job", "b:2"], "name the address by which others reach"),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, Secret(bytes(32)).text())
    monkeypatch.setattr(weights.signal, "signal", lambda number, handler: None)
    assert main(["weights", *command]) == 2
    assert told in capsys.readouterr().err


def test_weights_of_one_node_need_no_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--weights", "w", "script.py"]) == 2
    assert "start 'keepstep weights serve' beside the job" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("serve", "--listen", "127.0.0.1:0"), ("receive", "--from", "127.0.0.1:1")], ids=["serve", "receive"]
)
def test_signals_that_were_ignored_at_its_start_stay_ignored(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """`nohup keepstep weights receive`."""
    program = [*IGNORING, *command("weights", arguments[0], tmp_path, *arguments[1:])]
    environment = os.environ | {SECRET_VARIABLE: Secret(bytes(32)).text()}
    process = subprocess.Popen(program, stderr=subprocess.PIPE, env=environment)
    try:
        assert process.stderr is not None
        assert process.stderr.readline()  # the server serves, or tells that the controller does not answer
        assert handles(process.pid, signal.SIGTERM)
        assert ignored_by(process.pid) == IGNORED
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
