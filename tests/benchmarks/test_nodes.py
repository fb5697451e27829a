"""The benchmarks of jobs on many machines run, and say what they measured. Nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.benchmarks.quick import measured, table
from tests.network.lab import why_not


@pytest.mark.skipif((why := why_not()) is not None, reason=str(why))
def test_a_machine_and_a_controller_are_lost(tmp_path: Path) -> None:
    page = measured("nodes", tmp_path)
    _, *rows = table(page, "A machine is lost")
    assert [num for _, num, *_ in rows] == ["1", "1"]
    assert float(rows[0][2]) > 0
    _, *rows = table(page, "A step without its controller")
    assert {(way, pairs) for way, _, pairs, *_ in rows} == {("dead", "2"), ("restarting", "2")}


def test_a_controller_of_a_few_nodes(tmp_path: Path) -> None:
    _, *rows = table(measured("controller", tmp_path), "A controller and 16 agents")
    found = dict(rows)
    assert float(found["controller's memory, MiB"]) > 0
    assert rows[-1][1].endswith(" of 2")


def test_strangers_at_a_controllers_port(tmp_path: Path) -> None:
    _, *rows = table(measured("strangers", tmp_path), "Strangers at a controller's port")
    assert len(rows) == 7
    for row in rows:
        _, count, ended, *_, waits, newcomer = row
        assert ended == count
        assert "nan" not in waits
        assert newcomer != "never"
