"""The benchmarks of moving weights run, and the arithmetic about who was busy when is right. Nothing is timed."""

import importlib
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from tests.benchmarks.quick import BENCHMARKS, measured, table
from tests.network.lab import why_not

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
WHY_NOT = why_not()


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/weights_trace.py`; the scripts there import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("weights_trace")


def test_a_tiny_restore(tmp_path: Path) -> None:
    page = measured("restore", tmp_path)
    _, *rows = table(page, "Restoring a rank")
    ways = ["restore", "restore, by messages", "floor, memcpy", "floor, gloo", "checkpoint"]
    assert [row[0] for row in rows] == ways
    assert "1 runs of each, in turn" in page


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
    page = measured("weights", tmp_path / "results", "--failures", "--trace", str(tmp_path / "update.json"))
    case = "0.0077 GiB, 2 devices"
    for title, figure, number in (
        ("Publishing a version", "later updates: median (min–max)", 7),
        ("Which stages were busy", "Reload busy", 10),
        ("Floors of this machine", "reload", 5),
        ("Memory beyond the weights", "consumer: peak", 14),
        ("Other ways to do it", "safetensors / keepstep", 7),
    ):
        (_, *cases), *rows = table(page, title)
        assert cases == [case]
        assert len(rows) == number
        assert figure in {row[0] for row in rows}
    assert "that returns; 2 after the first." in page
    assert "Runs of each: 1, and a first one that is not counted." in page
    assert len(table(page, "A process breaks")) == 7
    events = json.loads((tmp_path / "update.json").read_text("utf-8"))["traceEvents"]
    stages = {(event["pid"], event["cat"]) for event in events if event["ph"] == "X"}
    assert stages == {(device, stage) for device in (0, 1) for stage in ("h2d", "broadcast", "reload")}
    command = [sys.executable, str(ROOT / "docs" / "draw_update.py"), "update.json", "update.svg"]
    subprocess.run(command, cwd=tmp_path, timeout=DEADLINE_S, check=True)
    drawn = "".join(ET.parse(tmp_path / "update.svg").getroot().itertext())
    assert all(word in drawn for word in ("device 0", "device 1", "H2D", "Broadcast", "Reload"))


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_tiny_machines(tmp_path: Path) -> None:
    page = measured("weights_nodes", tmp_path)
    (_, *cases), *rows = table(page, "Publishing to other machines")
    assert cases == ["1 Gbit/s, 1 nodes", "1 Gbit/s, 2 nodes"]
    ways = ["keepstep", "keepstep, TLS", "broadcast, gloo", "safetensors, HTTP", "checkpoint, HTTP"]
    assert [row[0] for row in rows[:6]] == ["floor, plain TCP", *ways]
    (title,) = re.findall(r"^## (By a model: .*)$", page, re.MULTILINE)
    assert [row[0] for row in table(page, title)[1:]] == ["1", "3"]
