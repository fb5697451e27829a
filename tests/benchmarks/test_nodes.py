"""The benchmarks of jobs on many machines run, and say what they measured. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.network.lab import why_not

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 300


def measured(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The figures and the page of a small run."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = folder.glob(f"*-{name}.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


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
