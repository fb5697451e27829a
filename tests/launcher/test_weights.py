"""A node's server of weights as a child process: run again when it dies, ended with its node."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from keepstep.config import SECRET_VARIABLE
from keepstep.launcher.cluster import weights
from keepstep.launcher.cluster.weights import HostedWeights

DEADLINE_S = 30.0
DIES = f"""
import os, sys, time
with open(sys.argv[1], "a") as out:
    print(os.getpid(), os.environ["{SECRET_VARIABLE}"], file=out)
if os.path.getsize(sys.argv[1]) > 30:
    time.sleep(1000)
"""


def test_a_server_that_dies_is_run_again_and_the_last_one_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "RESTART_S", 0.01)
    out = tmp_path / "out"
    out.touch()

    async def test() -> None:
        hosted = HostedWeights((sys.executable, "-c", DIES, str(out)), "s" * 16)
        running = asyncio.create_task(hosted.run())
        async with asyncio.timeout(DEADLINE_S):
            while out.read_text().count("\n") < 2:
                await asyncio.wait({running}, timeout=0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await hosted.end()

    asyncio.run(test())
    lines = [line.split() for line in out.read_text().splitlines()]
    assert [secret for _pid, secret in lines] == ["s" * 16] * 2
    assert not any(psutil.pid_exists(int(pid)) for pid, _secret in lines)
    assert "the server of weights has ended (exit code 0): it is started again" in capfd.readouterr().err


def test_a_server_that_cannot_be_run_is_not_run_again(capfd: pytest.CaptureFixture[str]) -> None:
    hosted = HostedWeights((sys.executable, "-c", "raise SystemExit(2)"), "")
    asyncio.run(asyncio.wait_for(hosted.run(), DEADLINE_S))
    assert "training continues without it" in capfd.readouterr().err
