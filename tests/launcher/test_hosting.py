"""The controller as a child: in which way it is started again."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.launcher.cluster import hosting
from keepstep.launcher.cluster.hosting import EXIT_SUPERSEDED, HostedController
from keepstep.protocol.recovery import RecoverySettings
from keepstep.trace.record import runfolder

SCRIPT = """
import sys
from pathlib import Path
from keepstep.trace.record import runfolder
folder, first, *how = sys.argv[1:]
lives = Path(folder, "lives")
with lives.open("a") as file:
    file.write(" ".join(how) + "\\n")
if not how:
    sys.exit(int(first))
runfolder.end(Path(folder), runfolder.read_info(Path(folder)), 3, "it has ended", 1)
sys.exit(3)
"""


@pytest.mark.parametrize(("code", "how"), [(1, "--continue"), (EXIT_SUPERSEDED, "--standby")])
def test_a_controller_that_has_ended_before_its_job_is_started_again(tmp_path: Path, code: int, how: str) -> None:
    """One that has lost its run to another one waits until that is gone."""
    runfolder.begin(tmp_path, runfolder.new_run(("train.py",), "node", RecoverySettings(1, 0)))
    command = (sys.executable, "-c", SCRIPT, str(tmp_path), str(code))
    assert asyncio.run(HostedController(command, tmp_path, "secret").run()) == 3
    assert (tmp_path / "lives").read_text().splitlines() == ["", how]


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$"])
def test_an_end_that_the_kernel_does_not_report_is_found(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    found = asyncio.run(hosting.ended(subprocess.Popen(["/bin/sh", "-c", script])))
    assert found == {"exit 3": (3, "exit code 3"), "kill -9 $$": (-9, "killed by SIGKILL")}[script]


TOLD = """
import os
import sys
what, number = sys.stdin.readline().split()
os._exit(128 + int(number) if what == "end" else 1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_a_controller_is_told_which_signal_has_ended_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C is 130, as of a shell."""

    async def whole() -> int:
        hosted = HostedController((sys.executable, "-c", TOLD), tmp_path, "secret")
        running = asyncio.create_task(hosted.run())
        await asyncio.sleep(0)  # it has started the process
        await hosted.end(number)
        return await running

    assert asyncio.run(whole()) == 128 + number
