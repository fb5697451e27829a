"""The benchmark of the dashboard runs, and says what it measured. Nothing is timed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 400


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine: apt-get install chromium")
def test_a_small_one(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "dashboard.py"), "--quick", "--results", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("*-dashboard.json")
    result = json.loads(path.read_text())
    assert result["scale"]["ranks"] == 64
    assert result["scale"]["fps"] > 0
    assert result["scale"]["lanes"] >= 8
    measured = [(part["ranks"], part["pages"], len(part["pairs"])) for part in result["cost"]]
    assert measured == [(1, 1, 2), (1, 5, 1), (2, 1, 1)]
    assert [len(found) for found in result["latency"].values()] == [1, 1]
    page = path.with_suffix(".md").read_text()
    assert "64 simulated ranks, one page" in page
    assert "A step while a page is open" in page
