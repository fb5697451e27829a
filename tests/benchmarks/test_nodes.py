"""The benchmarks of jobs on many machines run, and say what they measured. Nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.benchmarks.quick import measured
from tests.network.lab import why_not


@pytest.mark.skipif((why := why_not()) is not None, reason=str(why))
def test_a_machine_and_a_controller_are_lost(tmp_path: Path) -> None:
    result, page = measured("nodes", tmp_path)
    assert len(result["losses"]["to_step_ms"]) == 1
    assert result["losses"]["to_step_ms"][0] > 0
    assert {way: len(pairs) for way, pairs in result["steps"].items()} == {"dead": 2, "restarting": 2}
    assert "A machine is lost" in page
    assert "A step without its controller" in page


def test_a_controller_of_a_few_nodes(tmp_path: Path) -> None:
    result, page = measured("controller", tmp_path)
    assert result["agents"] == 16
    assert len(result["stops_ms"]) == 2
    assert result["memory_mib"] > 0
    assert "A controller and 16 agents" in page


def test_strangers_at_a_controllers_port(tmp_path: Path) -> None:
    result, page = measured("strangers", tmp_path)
    assert [each["ended"] for each in result["rounds"]] == [each["count"] for each in result["rounds"]]
    assert all(each["waited_ms"] and each["connected_s"] is not None for each in result["rounds"])
    assert "Strangers at a controller's port" in page
