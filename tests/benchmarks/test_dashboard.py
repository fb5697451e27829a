"""The benchmark of the dashboard runs, and says what it measured. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.trace.timeline.run import opened

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 400


def test_a_fed_run_has_the_durations_of_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost in it, and a node, whose lease expires."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    feed = importlib.import_module("dashboard_feed")
    source, target, until_s = tmp_path / "recorded", tmp_path / "fed", 24.0
    feed.simulate(source, 4, 8, until_s)
    with opened(source) as run:
        recorded = [scene.record.milliseconds() for scene in run.scenes]
    with feed.Feeder(source, target, until_s) as feeder:
        feeder._thread.join(DEADLINE_S)
    with opened(target) as run:
        fed = [scene.record.milliseconds() for scene in run.scenes]
    assert len(fed) == 2
    for found, expected in zip(fed, recorded, strict=True):
        assert found == pytest.approx(expected)


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
