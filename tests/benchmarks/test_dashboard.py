"""The benchmark of the dashboard runs, and says what it measured. Nothing is timed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.benchmarks.quick import measured, table


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
