"""All that needs a GPU: the tests that a machine without one skips, and what communicators and waits take there.

    python benchmarks/gpu.py --name h100          everything that this machine has the GPUs for; some minutes
    python benchmarks/gpu.py --only b             the waits alone; a: the communicators
    python benchmarks/gpu.py --no-tests           the figures without the tests

It needs neither make nor a network, and pytest for the tests. Without a GPU it says so and ends with exit code 3.

a: as many ranks as there are GPUs, at most eight, connect an NCCL group, abort it and connect the next one: what a
recovery waits for. b: steps of kernels of a given length, with and without the host's wait for the device before the
gradient barrier: what the lost run-ahead costs.

Prints tables, and writes ``benchmarks/results/DATE-gpu-NAME.md`` with the raw figures in a .json beside it. No figures
of a GPU have been written so far.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from checkout import ROOT
from page import RESULTS, Section, carry_out, heading, measure_parts, measured_in, parsed, provenance
from rich.console import Console
from tests.worker.ranks import Watcher, file_store, meet, run_ranks
from torch import distributed as dist

from keepstep.worker.backends.by_device import backends_of
from keepstep.worker.step.device_completion import completion_on

NO_GPU = 3
"""The exit code on a machine without one."""
TESTS = ("tests/gpu", "tests/worker/backends", "tests/weights/test_gpu.py")
TESTS_TIMEOUT_S = 420
MOST_RANKS = 8
CONNECT_DEADLINE = timedelta(seconds=60)
STEP_MS = (1, 20, 100)
STEPS = {1: 300, 20: 60, 100: 20}
"""Of each length, in a turn."""
TURNS = 3


def what_is_here() -> str:
    """The GPUs of this machine in words; empty: torch finds none."""
    if not torch.cuda.is_available():
        return ""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = ", ".join(f"{number} x {name}" for name, number in names.items())
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return f"{found}; CUDA {torch.version.cuda}, NCCL {nccl}"


# ---- the tests ------------------------------------------------------------------------------------------------------


def run_tests(console: Console) -> dict[str, Any]:
    """Runs the tests that need a GPU; how many passed and failed, and why others were skipped."""
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-") as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "", "-q", f"--junit-xml={report}", *TESTS]
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=TESTS_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            console.print(f"[red]the tests did not end within {TESTS_TIMEOUT_S} s[/red]", highlight=False)
            return {"exit_code": None}
        return {"exit_code": ended.returncode} | (outcomes(report) if report.exists() else {})


def outcomes(report: Path) -> dict[str, Any]:
    """What a report of pytest's in JUnit's form says."""
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"] += 1
            failed.append(name)
        elif (skipped := case.find("skipped")) is not None:
            found["skipped"] += 1
            reasons[str(skipped.get("message"))] += 1
        else:
            found["passed"] += 1
    return {"passed": found["passed"], "failed": failed, "skipped": found["skipped"], "reasons": dict(reasons)}


# ---- a: communicators -----------------------------------------------------------------------------------------------


def rebuild(rank: int, size: int, path: Path, turns: int) -> list[dict[str, float]]:
    """Connects, reduces, aborts with an operation under way, and waits until the device is quiet; seconds of each."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    tensor = torch.ones(1 << 20, device=device)
    found = []
    for turn in range(turns):
        group = backends_of(device)["cuda"]("bench", Watcher(), "127.0.0.1")
        meet(path, size, f"ready {turn}")
        times = [time.monotonic()]
        group.connect(file_store(path, turn), rank, size, CONNECT_DEADLINE, CONNECT_DEADLINE)
        times.append(time.monotonic())
        group.barrier().wait()
        times.append(time.monotonic())
        meet(path, size, f"reduced {turn}")
        if rank == 0 and size > 1:
            group.barrier(tensor)  # the other ranks do not come
        times.append(time.monotonic())
        group.abort()
        if not group.wait_until_quiet(CONNECT_DEADLINE.total_seconds()):
            raise RuntimeError("the group was not quiet after it was aborted")
        times.append(time.monotonic())
        group.release()
        found.append({"connect": times[1] - times[0], "first": times[2] - times[1], "abort": times[4] - times[3]})
    return found


def communicators(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The times of all ranks and turns."""
    num_ranks = min(torch.cuda.device_count(), MOST_RANKS)
    answers = run_ranks(num_ranks, rebuild, folder, args.turns + 1)
    worst = [
        {name: max(answer[turn][name] for answer in answers) for name in answers[0][0]}
        for turn in range(1, args.turns + 1)  # the first one loads libraries
    ]
    return {"ranks": num_ranks, "first_turn": answers[0][0], "turns": worst}


# ---- b: waits -------------------------------------------------------------------------------------------------------


def waits(args: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """Seconds a step, by the length of a step's kernels, with the wait and without it."""
    (found,) = run_ranks(1, steps_of_kernels, args.turns)
    return dict(found)


def steps_of_kernels(_rank: int, _size: int, turns: int) -> dict[str, Any]:
    """In turns: every step launches ten kernels; the host waits for them at the end of each, or runs ahead."""
    device = torch.device("cuda", 0)
    completion = completion_on(device)
    cycles_of_a_ms = calibrated()
    found: dict[str, Any] = {}
    for step_ms in STEP_MS:
        taken: dict[str, list[float]] = {"waits": [], "runs ahead": []}
        for _turn in range(turns):
            for how, each in taken.items():
                torch.cuda.synchronize()
                begun_s = time.monotonic()
                for _step in range(STEPS[step_ms]):
                    for _kernel in range(10):
                        torch.cuda._sleep(int(cycles_of_a_ms * step_ms / 10))
                    if how == "waits":
                        completion.wait(lambda: None, lambda: False)
                torch.cuda.synchronize()
                each.append((time.monotonic() - begun_s) / STEPS[step_ms])
        found[str(step_ms)] = taken
    return found


def calibrated() -> float:
    """How many cycles of a kernel that does nothing take a millisecond."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / begin.elapsed_time(end))


PARTS = [("a", "communicators", communicators), ("b", "waits", waits)]


# ---- what is shown --------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> list[Section]:
    """The tables."""
    found = []
    if tests := result.get("tests"):
        notes = [f"skipped {number}: {reason}" for reason, number in tests.get("reasons", {}).items()]
        notes += [f"failed: {name}" for name in tests.get("failed", [])]
        row = [str(tests.get("passed", "?")), str(len(tests.get("failed", []))), str(tests.get("skipped", "?"))]
        found.append(Section("Tests", ["passed", "failed", "skipped"], [row], notes))
    if groups := result.get("communicators"):
        rows = [
            [what, *(f"{1000 * pick(turn[name] for turn in groups['turns']):.1f}" for pick in (statistics.median, max))]
            for name, what in (("connect", "connect"), ("first", "first operation"), ("abort", "abort until quiet"))
        ]
        title = f"Communicators of {groups['ranks']} ranks, ms, the slowest rank of each turn"
        found.append(Section(title, ["", "median", "greatest"], rows, []))
    if steps := result.get("waits"):
        rows = [
            [f"{ms} ms", *(f"{1000 * statistics.median(taken[how]):.3f}" for how in ("runs ahead", "waits"))]
            for ms, taken in steps.items()
        ]
        found.append(Section("A step, ms", ["kernels", "the host runs ahead", "it waits once a step"], rows, []))
    return found


def markdown(result: dict[str, Any], raw: str) -> str:
    """The page."""
    begin = heading("What needs a GPU", result).replace(", gloo, CPU.", f".\n* GPUs: {result['gpus']}.")
    return "\n".join([begin + measured_in(result, raw), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Runs and measures; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", default="gpu", help="of the machine, for the page's name (default: gpu)")
    parser.add_argument("--only", choices=[letter for letter, _name, _function in PARTS], help="one part alone")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each measurement (default: {TURNS})")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    args = parsed(parser, {"turns": 1})
    console = Console(stderr=False)
    gpus = what_is_here()
    if not gpus:
        console.print(
            f"gpu.py: torch {torch.__version__} finds no GPU (CUDA) on this machine, so there is nothing to run",
            highlight=False,
            soft_wrap=True,
        )
        return NO_GPU

    def measure() -> dict[str, Any]:
        tests = {} if args.no_tests else {"tests": run_tests(console)}
        return tests | measure_parts(PARTS, args, console)

    result = provenance("gpu.py") | {"gpus": gpus}
    folder = None if args.quick else args.results
    return carry_out(f"gpu-{args.name}", result, measure, sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
