"""The benchmarks of moving weights run, and the arithmetic about who was busy when is right. Nothing is timed."""

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from tests.network.lab import why_not

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
DEADLINE_S = 240
WHY_NOT = why_not()


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/weights_trace.py`; the scripts there import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("weights_trace")


def test_a_tiny_restore() -> None:
    command = [sys.executable, str(BENCHMARKS / "restore.py"), "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    seconds = json.loads(ended.stdout)["seconds"]
    assert {way: len(found) for way, found in seconds.items()} == dict.fromkeys(
        ["restore", "restore, by messages", "floor, memcpy", "floor, gloo", "checkpoint"], 1
    )


def test_shares_of_an_update(trace: ModuleType) -> None:
    works = (
        trace.Work(0, "h2d", 0, 0, 40),
        trace.Work(1, "h2d", 1, 20, 50),  # the same stage: nothing overlaps yet
        trace.Work(1, "broadcast", 0, 40, 60),  # beside the H2D of its own device for 10
        trace.Work(0, "reload", 0, 45, 90),  # all three from 45 to 50, of which none on device 0
    )
    update = trace.Timeline(0, 100, works)
    assert update.busy_share("h2d") == pytest.approx(0.35)
    assert update.overlap(1) == pytest.approx(0.9)
    assert update.overlap(2) == pytest.approx(0.2)
    assert update.overlap(3) == pytest.approx(0.05)
    assert update.overlap(2, device=0) == 0.0
    assert update.overlap(2, device=1) == pytest.approx(0.1)


def test_a_tiny_run_of_everything(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--quick", "--json", "--failures"]
    command += ["--trace", str(tmp_path / "update.json"), "--results", str(tmp_path / "results")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    (case,) = result["cases"]
    assert len(case["updates"]) == 3
    assert {row["stage"] for row in case["floors"]} == {"one", "h2d", "gloo", "memcpy", "reload"}
    assert {way: len(seconds) for way, seconds in case["others"].items()} == {
        "checkpoint": 2,
        "broadcast": 2,
        "safetensors": 2,
    }
    assert len(case["memory"]) == 4
    assert len(result["failures"]) == 6
    events = json.loads((tmp_path / "update.json").read_text("utf-8"))["traceEvents"]
    stages = {(event["pid"], event["cat"]) for event in events if event["ph"] == "X"}
    assert stages == {(device, stage) for device in (0, 1) for stage in ("h2d", "broadcast", "reload")}
    command = [sys.executable, str(ROOT / "docs" / "draw_update.py"), "update.json", "update.svg"]
    subprocess.run(command, cwd=tmp_path, timeout=DEADLINE_S, check=True)
    drawn = "".join(ET.parse(tmp_path / "update.svg").getroot().itertext())
    assert all(word in drawn for word in ("device 0", "device 1", "H2D", "Broadcast", "Reload"))
    assert {path.suffix for path in (tmp_path / "results").iterdir()} == {".md", ".json"}


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_tiny_machines() -> None:
    command = [sys.executable, str(BENCHMARKS / "weights_nodes.py"), "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert [section["rows"][0][0] for section in result["model"]] == ["1"]
    cases = result["cases"]
    assert [(case["gbit_per_s"], case["nodes"]) for case in cases] == [(1.0, 1), (1.0, 2)]
    for case in cases:
        ways = ("floor", "keepstep", "keepstep, TLS", "broadcast, gloo", "safetensors, HTTP", "checkpoint, HTTP")
        assert {way: len(case[way]) for way in ways} == dict.fromkeys(ways, 1)
