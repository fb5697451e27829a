"""The benchmark of the dashboard runs, and says what it measured. Nothing is timed."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
from tests.benchmarks.quick import BENCHMARKS, measured, table

from keepstep.trace.timeline.run import opened

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
    page = measured("dashboard", tmp_path)
    found = {what: float(figure) for what, figure in table(page, "64 simulated ranks, one page")[1:]}
    assert found["frames a second"] > 0
    assert found["lanes"] >= 8
    _, *rows = table(page, "A step while a page is open")
    assert {(who, pairs) for who, _, pairs, *_ in rows} == {
        ("1 rank, one page", "2"),
        ("1 rank, 5 pages", "1"),
        ("2 ranks, one page", "1"),
    }
    _, *rows = table(page, "Seconds until the page shows it")
    assert [num for _, num, *_ in rows] == ["1", "1"]
