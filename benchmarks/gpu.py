"""Everything that needs a GPU: the tests that other machines skip, and measurements of keepstep with their floors.

    python benchmarks/gpu.py --name h100          everything that this machine has the GPUs for; below nine minutes
    python benchmarks/gpu.py --only c             only the waits
    python benchmarks/gpu.py --no-tests           the measurements without the tests
    python benchmarks/gpu.py --quick --on-cpu     a smoke test of the parts without a GPU

It needs neither make nor a network, and pytest only for the tests. Without a GPU it prints this and ends with exit code
3. If a part fails, or no time is left for it, the others still run, and the page shows the reason.

a: as many ranks as there are GPUs, at most eight, connect an NCCL group, abort it and connect the next one, as in a
recovery. b: NCCL's own ways from one communicator to the next. c: steps of kernels of a given length, with different
waits of the host before the gradient barrier: the cost of the lost run-ahead. d: a plain loop and keepstep's. e: a
state restored from two holders, next to copies of the same bytes. f: snapshots, next to the copies alone. g: weights
published with buffers on the GPU. h: the parts of a recovery, from a drill. i: the same with three and with four ranks
that share the first GPU, over gloo even if NCCL is available: a rank killed in each phase of a step.

Prints tables, and writes ``benchmarks/results/DATE-gpu-NAME.md``. No figures of a GPU have been written so far.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_groups
import gpu_state
import torch
from checkout import ROOT
from page import RESULTS, Section, carry_out, heading, measure_parts, measured_in, parsed, provenance
from rich.console import Console
from torch import distributed as dist

from keepstep.errors import KeepstepError

NO_GPU = 3
"""The exit code on a machine without a GPU."""
TESTS = ("tests/gpu", "tests/worker/backends", "tests/weights/test_gpu.py")
TESTS_TIMEOUT_S = 240
BUDGET_S = 370
"""Seconds after which no part begins. Each takes a minute at most, except a drill with two and a half."""
LETTERS = "abcdefghi"
STEPS = {20: 20, 100: 6, 500: 2}
QUICK_STEPS = {20: 3}
"""Length of a step in milliseconds -> number of its steps in a turn."""
TURNS = 3
MIB = 1536
"""Size of the state and of the weights."""


def what_is_here() -> str:
    """Returns a description of this machine's GPUs; empty if torch finds none."""
    if not torch.cuda.is_available():
        return ""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = ", ".join(f"{number} x {name}" for name, number in names.items())
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return f"{found}; CUDA {torch.version.cuda}, NCCL {nccl}"


# ---- the tests ------------------------------------------------------------------------------------------------------


def run_tests(console: Console) -> dict[str, Any]:
    """Runs the tests that need a GPU. Returns how many passed and failed, and why others were skipped."""
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
    """Returns the outcomes in a JUnit report of pytest."""
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


# ---- the parts ------------------------------------------------------------------------------------------------------


def parts(args: argparse.Namespace) -> list[tuple[str, str, Callable[[argparse.Namespace, Path], Any]]]:
    """Returns letter, name and function of each part, in their order. The parts of a recovery come first."""
    kind = "cpu" if args.on_cpu else "cuda"
    steps = QUICK_STEPS if args.quick else STEPS
    long_steps = {ms: number for ms, number in steps.items() if ms >= 100 or args.quick}
    size = args.mib << 20
    functions: list[tuple[str, Callable[[int, Path], Any]]] = [
        ("communicators", lambda turns, folder: gpu_groups.communicators(kind, turns, folder)),
        ("nccl", lambda turns, folder: gpu_groups.nccl_ways(kind, turns, folder)),
        ("waits", lambda turns, folder: gpu_groups.waits(kind, turns, folder, steps)),
        ("overhead", lambda turns, folder: gpu_groups.overhead(kind, turns, folder, steps)),
        ("restore", lambda turns, folder: gpu_state.restores(kind, turns, folder, size)),
        ("snapshots", lambda turns, folder: gpu_state.snapshots(kind, turns, folder, size, long_steps)),
        ("weights", lambda turns, folder: gpu_state.weights(kind, turns, folder, size)),
        ("recovery", lambda turns, folder: gpu_state.recovery(kind, turns, folder)),
        ("shared", lambda turns, folder: gpu_state.shared(kind, turns, folder)),
    ]
    return [
        (letter, name, guarded(name, function)) for letter, (name, function) in zip(LETTERS, functions, strict=True)
    ]


def guarded(name: str, function: Callable[[int, Path], Any]) -> Callable[[argparse.Namespace, Path], Any]:
    """Returns a part that catches its own failure, and that is skipped when the time is over."""

    def measure(args: argparse.Namespace, folder: Path) -> Any:
        if time.monotonic() > args.until_s:
            return {"skipped": f"the {BUDGET_S} s of the whole run were over"}
        try:
            return dict(function(args.turns, folder))
        except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError, KeepstepError) as error:
            return {"failed": f"{name}: {error}"}

    return measure


# ---- output ---------------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    tables = {
        "tests": of_tests,
        "communicators": of_communicators,
        "nccl": of_nccl,
        "waits": of_steps("A step, ms, by what the host waits for", "kernels"),
        "overhead": of_steps("A step of one rank, ms", "kernels"),
        "restore": of_restore,
        "snapshots": of_snapshots,
        "weights": of_weights,
        "recovery": of_recovery,
        "shared": of_shared,
    }
    found = []
    for name, table in tables.items():
        if part := result.get(name):
            reason = part.get("failed") or part.get("skipped") if name != "tests" else None
            found.append(
                Section(name, ["not measured"], [[" ".join(str(reason).split())]], []) if reason else table(part)
            )
    return found


def of_tests(tests: dict[str, Any]) -> Section:
    notes = [f"skipped {number}: {reason}" for reason, number in tests.get("reasons", {}).items()]
    notes += [f"failed: {name}" for name in tests.get("failed", [])]
    row = [str(tests.get("passed", "?")), str(len(tests.get("failed", []))), str(tests.get("skipped", "?"))]
    return Section("Tests", ["passed", "failed", "skipped"], [row], notes)


def ms(values: list[float]) -> list[str]:
    """Returns median and maximum."""
    return [f"{1000 * pick(values):.3f}" for pick in (statistics.median, max)]


def of_communicators(groups: dict[str, Any]) -> Section:
    rows = [
        [what, *ms([turn[name] for turn in groups["turns"]])]
        for name, what in (("connect", "connect"), ("first", "first operation"), ("abort", "abort until quiet"))
    ]
    title = f"Communicators of {groups['ranks']} ranks, ms, the slowest rank of each turn"
    return Section(title, ["", "median", "greatest"], rows, [])


def of_nccl(found: dict[str, Any]) -> Section:
    ways = found["ways"]
    version = ".".join(map(str, found["version"]))
    title = f"From one communicator to the next, {found['ranks']} ranks, NCCL {version}, ms, the slowest rank"
    notes = [] if any("revoke" in way for way in ways) else ["this NCCL has no ncclCommRevoke (2.28.9 and newer)"]
    return Section(title, ["", "median", "greatest"], [[way, *ms(each)] for way, each in ways.items()], notes)


def of_steps(title: str, first: str) -> Callable[[dict[str, Any]], Section]:
    """Returns a function that makes a table with a row for each length of steps."""

    def table(lengths: dict[str, Any]) -> Section:
        ways = list(next(iter(lengths.values())))
        rows = [
            [f"{length} ms", *(f"{1000 * statistics.median(taken[way]):.3f}" for way in ways)]
            for length, taken in lengths.items()
        ]
        return Section(title, [first, *ways], rows, ["medians of the turns"])

    return table


def rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 2**30 / seconds:.2f}"


def of_restore(found: dict[str, Any]) -> Section:
    rows = [
        [way, f"{1000 * statistics.median(each):.1f}", rate(found["bytes"], statistics.median(each))]
        for way, each in found["seconds"].items()
    ]
    title = f"A state of {found['bytes'] >> 20} MiB restored from two holders"
    return Section(title, ["", "ms", "GiB/s"], rows, ["floors: as many bytes copied in pieces of 32 MiB, nothing else"])


def of_snapshots(found: dict[str, Any]) -> Section:
    rows = [
        [what, f"{1000 * seconds:.1f}", rate(found["bytes"], seconds)]
        for what, seconds in (
            ("the first, which takes its memory", found["first"]),
            ("one alone", statistics.median(found["copy"])),
            ("floor: device to pinned memory", found["floor"]),
            ("floor: hash", found["hash"]),
        )
    ]
    for length, taken in found["steps"].items():
        for how, each in taken.items():
            rows.append([f"a step of {length} ms {how} one", f"{1000 * statistics.median(each):.1f}", ""])
    return Section(f"Snapshots of {found['bytes'] >> 20} MiB", ["", "ms", "GiB/s"], rows, [])


def of_weights(found: dict[str, Any]) -> Section:
    rows = []
    for source, each in found.items():
        parts_s = {"a version": statistics.median(each["seconds"])} | each["busy"] | each["floors"]
        rows += [[source, name, f"{1000 * s:.1f}", rate(each["bytes"], s)] for name, s in parts_s.items()]
    notes = [
        "h2d, broadcast, reload: how long a stage was busy; where they overlap, their sum exceeds a version's time"
    ]
    return Section("Weights, buffers on the GPU", ["from", "", "ms", "GiB/s"], rows, notes)


MOMENTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")


def of_faults(found: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{fault['fault']} in {fault['phase']}"]
        + ["-" if fault.get(f"{name}_ms") is None else f"{fault[f'{name}_ms']:.1f}" for name in MOMENTS]
        for fault in found["faults"]
    ]


def of_recovery(found: dict[str, Any]) -> Section:
    return Section(
        "A recovery of two ranks, ms", ["", *MOMENTS], of_faults(found), [f"identical: {found['identical']}"]
    )


def of_shared(found: dict[str, Any]) -> Section:
    rows = [[f"{number} ranks: {row[0]}", *row[1:]] for number, drill in found.items() for row in of_faults(drill)]
    notes = [f"{number} ranks: identical: {drill['identical']}" for number, drill in found.items()]
    return Section("Recoveries of ranks that share a GPU, by gloo, ms", ["", *MOMENTS], rows, notes)


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    begin = heading("What needs a GPU", result).replace(", gloo, CPU.", f".\n* GPUs: {result['gpus']}.")
    return "\n".join([begin + measured_in(result), *(section.markdown() for section in sections(result))])


def main() -> int:
    """Runs the tests and the measurements. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", default="gpu", help="of the machine, for the page's name (default: gpu)")
    parser.add_argument("--only", choices=list(LETTERS), help="one part alone")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each measurement (default: {TURNS})")
    parser.add_argument("--mib", type=int, default=MIB, help=f"of state and weights (default: {MIB})")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--on-cpu", action="store_true", help="the parts without a GPU: figures mean nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the page")
    args = parsed(parser, {"turns": 1, "mib": 8})
    args.until_s = time.monotonic() + BUDGET_S
    console = Console(stderr=False)
    gpus = what_is_here()
    if not gpus and not args.on_cpu:
        console.print(
            f"gpu.py: torch {torch.__version__} finds no GPU (CUDA) on this machine, so there is nothing to run",
            highlight=False,
            soft_wrap=True,
        )
        return NO_GPU

    found: dict[str, Any] = {}

    def measure() -> dict[str, Any]:
        if not (args.no_tests or args.on_cpu):
            found["tests"] = run_tests(console)
        found.update(measure_parts(parts(args), args, console))
        return found

    result = provenance("gpu.py") | {"gpus": gpus or "none"}
    folder = None if args.quick or args.on_cpu else args.results
    carry_out(f"gpu-{args.name}", result, measure, sections, markdown, console, folder)
    return int(has_failed(found))


def has_failed(found: dict[str, Any]) -> bool:
    """Returns whether a test or a part has failed."""
    tests = found.get("tests", {"exit_code": 0})
    return tests["exit_code"] != 0 or any("failed" in part for name, part in found.items() if name != "tests")


if __name__ == "__main__":
    sys.exit(main())
