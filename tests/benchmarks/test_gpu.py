"""`benchmarks/gpu.py` on a machine without a GPU, and the page that it would write on another one."""

import argparse
import importlib
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "cores": 16,
    "processor": "P",
    "memory_gib": 128.0,
    "system": "Linux 6",
    "load_at_start": 0.1,
    "python": "3.11",
    "torch": "2.13",
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: make gpu runs it there")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--results", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "finds no GPU (CUDA) on this machine" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_page_says_what_was_skipped_and_why(gpu: ModuleType) -> None:
    result: dict[str, Any] = {
        "date": "2026-11-25",
        "command": "python benchmarks/gpu.py",
        "machine": MACHINE,
        "gpus": "1 x G; CUDA 13, NCCL 2.30",
        "minutes": 3.0,
        "tests": {"passed": 5, "failed": ["t::f"], "skipped": 2, "reasons": {"needs 2 GPUs: torch finds 1": 2}},
        "communicators": {"ranks": 1, "turns": [{"connect": 0.2, "first": 0.001, "abort": 0.05}]},
        "nccl": {"skipped": "NCCL needs GPUs"},
        "waits": {"20": {"runs ahead": [0.02], "device": [0.0213, 0.0212]}},
        "restore": {"bytes": 1 << 30, "seconds": {"from GPU to GPU": [0.5, 0.25, 0.25]}},
        "weights": {"failed": "weights: rank 0:\nTraceback"},
        "shared": {
            "3": {"identical": True, "faults": [{"fault": "kill", "phase": "synced", "gap_ms": 250.0}]},
        },
    }
    page = gpu.markdown(result)
    for text in (
        "GPUs: 1 x G; CUDA 13",
        "skipped 2: needs 2 GPUs: torch finds 1",
        "failed: t::f",
        "| connect | 200.000 | 200.000 |",
        "| NCCL needs GPUs |",
        "| 20 ms | 20.000 | 21.250 |",
        "| from GPU to GPU | 250.0 | 4.00 |",
        "| weights: rank 0: Traceback |",
        "| 3 ranks: kill in synced | - | - | - | - | - | - | 250.0 |",
        "3 ranks: identical: True",
    ):
        assert text in page
    assert "gloo, CPU" not in page


def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    """Its figures mean nothing, but it does on a GPU what it does here."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--quick", "--on-cpu", "--results", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("not measured") == 2, "NCCL and the drill need GPUs"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_takes_no_other_along(gpu: ModuleType) -> None:
    def fail(turns: int, folder: Path) -> None:
        raise RuntimeError("CUDA error: out of memory")

    args = argparse.Namespace(turns=1, until_s=math.inf)
    found = {"waits": gpu.guarded("waits", fail)(args, Path())}
    assert found == {"waits": {"failed": "waits: CUDA error: out of memory"}}
    assert gpu.has_failed(found)
    args.until_s = 0.0
    found = {"waits": gpu.guarded("waits", fail)(args, Path())}
    assert "skipped" in found["waits"]
    assert not gpu.has_failed(found)
    assert gpu.has_failed({"tests": {"exit_code": None}}), "it did not end"


def test_outcomes_are_read_from_pytest_s_report(gpu: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='good'/>"
        "<testcase classname='a' name='bad'><failure message='no'/></testcase>"
        "<testcase classname='a' name='left'><skipped message='needs a GPU'/></testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    assert gpu.outcomes(report) == {"passed": 1, "failed": ["a::bad"], "skipped": 1, "reasons": {"needs a GPU": 1}}
