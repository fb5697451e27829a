"""The benchmark of small collectives, small: it stands in for the worker that a group tells what happens."""

import subprocess
import sys

from tests.support.jobs import ROOT


def test_a_small_one() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "collectives.py"), "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "all_reduce" in ended.stdout
