"""Many seeds on several processes."""

import os
from pathlib import Path

import pytest

from keepstep import programs
from keepstep.sim.batch import run_on_all_cores

PROCESS = """#!/bin/sh
cd {folder}
case "$*" in
  *"--from 0 "*) read line < gate; echo '{{"num_seeds": 1}}' ;;
  *) yes '{{"num_seeds": 2}}' | head -n 20000; echo open > gate ;;
esac
"""


def test_no_process_waits_until_others_have_been_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends when the second has written more than a pipe holds."""
    program = tmp_path / "python"
    program.write_text(PROCESS.format(folder=tmp_path))
    program.chmod(0o700)
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setattr(programs.sys, "executable", str(program))
    assert sum(tally.num_seeds for tally in run_on_all_cores(0, 10, 2, None)) == 40_001
