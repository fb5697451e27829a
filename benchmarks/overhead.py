"""Overhead of keepstep without failures: steps of about 1, 10 and 100 ms on 1, 2 and 3 ranks, next to plain torchrun.

    python benchmarks/overhead.py                  everything; about twelve minutes on two idle cores
    python benchmarks/overhead.py --ranks 2 --step-ms 1
    python benchmarks/overhead.py --quick          a smoke test; nothing is written

The same script (`train_timed.py`) runs under both launchers at the same time. The jobs take turns: one trains a block
of steps while the other waits before its next step. So the two blocks of a pair are a second apart, and other load of
the machine affects both alike. But even processes of one plain script differ by some percent, because of their memory
layout. So the benchmark starts both jobs several times for each size, and counts a start as one measurement. The
processor time of a step is that of all ranks; the launchers' is listed separately. keepstep's launcher polls a waiting
job every 20 ms, and a training one every 50 ms. This slows plain torchrun's steps, too, so the measured difference is a
little too small. A profile of one more keepstep job shows where the time goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pstats
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
import turns
from jobs import RunningJob, pipes
from page import RESULTS, Section
from rich.console import Console
from train_timed import Training, build_model

WORKER = Path(__file__).with_name("train_timed.py")
KINDS = ("torchrun", "keepstep")
UNSET = "torchrun, allocator unset"
"""A third kind of job: without the allocator's variables, which keepstep's workers get by default."""
SHAPES = {1: (64, 4), 10: (256, 8), 100: (512, 8)}
"""Time of a step in milliseconds -> width and depth of the model. The batch size is calibrated."""
BLOCK_S = 0.5
"""Length of a turn. It is short because the machine's speed drifts over seconds."""
NOT_COUNTED = 2
"""Number of steps at the start of a turn that do not count, because the ranks start them at different times."""
PROFILED_STEPS = 2000
DEADLINE_S = 120.0
QUICK = {"starts": 2, "pairs": 1, "ranks": [2], "step_ms": [1], "block_s": 0.02, "profiled_steps": 20}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8, help="of both jobs, for each size and number of ranks")
    parser.add_argument("--pairs", type=int, default=4, help="of turns, for each start")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--step-ms", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--block-s", type=float, default=BLOCK_S, help="how long a turn lasts (default: %(default)s)")
    parser.add_argument("--profiled-steps", type=int, default=PROFILED_STEPS, help="0: no profile")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and the batch that a job trains."""

    width: int
    depth: int
    batch: int

    def command(self, kind: str, num_ranks: int, folder: Path, *more: str) -> list[str]:
        """Returns the command line of a job. It has no spare, which would take part in no step."""
        sizes = ["--width", str(self.width), "--depth", str(self.depth), "--batch", str(self.batch)]
        worker = [str(WORKER), "--folder", str(folder), *sizes, *more]
        ranks = ["--nproc-per-node", str(num_ranks)]
        if kind == "keepstep":
            # A rank waits for its turn between two steps, or in a step of a framework's loop.
            patience = ["--between-steps", str(DEADLINE_S), "--hang-floor", str(DEADLINE_S)]
            flags = [*ranks, "--spares", "0", *patience]
            return [sys.executable, "-m", "keepstep.cli.main", "run", *flags, *worker, "--keepstep"]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, *worker]


def calibrated(step_ms: float, width: int, depth: int) -> Shape:
    """Returns a shape whose step takes about ``step_ms`` on one idle core, without DDP."""
    torch.set_num_threads(1)
    batch, taken_ms = 1, 0.0
    while True:
        taken_ms = _step_ms(Training(build_model(width, depth), width, batch))
        if taken_ms >= step_ms / 2 or batch > 1 << 16:
            break
        batch *= 2
    return Shape(width, depth, max(1, round(batch * min(2.0, step_ms / taken_ms))))


def _step_ms(training: Training, repeats: int = 9) -> float:
    """Returns the time of a step in this process, in milliseconds."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


class Turns:
    """One of the two jobs. It waits before its next block of steps. Use it in a ``with`` block of a stack."""

    def __init__(
        self, command: list[str], folder: Path, num_ranks: int, stack: ExitStack, *, keeps_memory: bool = True
    ) -> None:
        self.folder = folder
        self._num_ranks = num_ranks
        names = ["arrived", *(f"go-{rank}" for rank in range(num_ranks))]
        self._pipes = stack.enter_context(pipes(folder, names))
        started_s = time.monotonic()
        self.job = stack.enter_context(RunningJob(command, folder, keeps_memory=keeps_memory))
        self._wait_for_all()
        self.start_s = time.monotonic() - started_s
        """Time from the command until all ranks are at their first step."""
        self._begun_s, self._cpu_before_s = time.monotonic(), self.job.cpu_now_s()

    def take(self) -> None:
        """Lets every rank train one block, and waits until all have completed it."""
        for name, descriptor in self._pipes.items():
            if name != "arrived":
                os.write(descriptor, b"x")
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        end_s = time.monotonic() + DEADLINE_S
        for _ in range(self._num_ranks):
            while not select.select([self._pipes["arrived"]], [], [], 1.0)[0]:
                self.job.check_alive("a turn")
                if time.monotonic() > end_s:
                    raise self.job.failure(f"a turn took more than {DEADLINE_S:g} s")
            os.read(self._pipes["arrived"], 1)

    def launcher_cpu_percent(self) -> float:
        """Returns the launcher's processor time since the first turn, in percent of one core."""
        used_s = self.job.cpu_now_s() - self._cpu_before_s
        return 100 * used_s / (time.monotonic() - self._begun_s)

    def blocks(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the time of each counted step, and the processor time of a step on all ranks, in milliseconds.

        Returns:
            arrays of shape [blocks, steps] (of rank 0: ranks wait for each other in every step) and [blocks].

        Raises:
            JobFailed: steps were repeated, because a rank was lost or reported as lost.
        """
        by_rank = [np.fromfile(self.folder / f"steps-{rank}", "<i8") for rank in range(self._num_ranks)]
        if any(len(each) % (2 * block) for each in by_rank):
            raise self.job.failure("a rank was lost between two turns")
        records = np.stack([each.reshape(-1, block, 2)[:, NOT_COUNTED - 1 :] for each in by_rank]) / 1e6
        steps_ms = np.diff(records[0, :, :, 0], axis=1)
        cpu_ms = (records[:, :, -1, 1] - records[:, :, 0, 1]).sum(axis=0) / (records.shape[2] - 1)
        return steps_ms, cpu_ms


def measure_one(shape: Shape, step_ms: int, num_ranks: int, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measures both jobs of one size, each started several times."""
    block = max(NOT_COUNTED + 3, round(args.block_s * 1000 / (step_ms + 1) / max(1, num_ranks - 1)))
    starts = []
    for number in range(args.starts):
        with tempfile.TemporaryDirectory(dir=root) as name:
            starts.append(one_start(shape, num_ranks, block, args.pairs, number, Path(name)))
    figures = {key: {kind: _median(start[key][kind] for start in starts) for kind in KINDS} for key in starts[0]}
    more = {
        key: sorted(start[key]["keepstep"] - start[key]["torchrun"] for start in starts)
        for key in ("median_ms", "tenth_ms", "cpu_ms")
    }
    return {"step_ms": step_ms, "ranks": num_ranks, **figures, "more": more}


def one_start(
    shape: Shape, num_ranks: int, block: int, num_pairs: int, number: int, root: Path, kinds: Sequence[str] = KINDS
) -> dict[str, dict[str, float]]:
    """Starts a job of each kind and lets them take turns. The first turn of each does not count.

    Returns:
        figure -> kind of job -> its value.
    """
    with ExitStack() as stack:
        jobs = {}
        for kind in kinds:
            folder = root / kind.replace(" ", "-")
            folder.mkdir()
            command = shape.command(kind, num_ranks, folder, "--block", str(block))
            jobs[kind] = Turns(command, folder, num_ranks, stack, keeps_memory=kind != UNSET)
        for turn in range(1 + num_pairs):
            for kind in kinds if (number + turn) % 2 == 0 else kinds[::-1]:
                jobs[kind].take()
        launcher = {kind: round(jobs[kind].launcher_cpu_percent(), 2) for kind in kinds}
        measured = {kind: [each[1:] for each in jobs[kind].blocks(block)] for kind in kinds}
        for each in jobs.values():
            each.job.kill()  # they wait for their turn, and would only end after their grace period
    return {
        "median_ms": {kind: float(np.median(measured[kind][0])) for kind in kinds},
        "tenth_ms": {kind: float(np.quantile(measured[kind][0], 0.1)) for kind in kinds},
        "cpu_ms": {kind: float(np.median(measured[kind][1])) for kind in kinds},
        "launcher_cpu_percent": launcher,
        "start_s": {kind: round(jobs[kind].start_s, 2) for kind in kinds},
    }


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def profiled(shape: Shape, num_ranks: int, num_steps: int, root: Path) -> list[dict[str, Any]]:
    """Profiles the steps of a keepstep job with Python's profiler.

    Returns:
        for each of keepstep's functions its calls and its microseconds per step. They include the functions of torch
        and of Python's library that it calls, but not those of keepstep that it calls directly.
    """
    folder = root / "profiled"
    folder.mkdir()
    command = shape.command(
        "keepstep", num_ranks, folder, "--block", str(num_steps), "--steps", str(num_steps), "--profile"
    )
    with pipes(folder, ["arrived", *(f"go-{rank}" for rank in range(num_ranks))]) as opened:
        for name, descriptor in opened.items():
            if name != "arrived":
                os.write(descriptor, b"x")
        with RunningJob(command, folder) as job:
            job.wait(DEADLINE_S)
    functions = pstats.Stats(str(folder / "profile")).stats  # type: ignore[attr-defined]  # not in the stub
    own_us = {key: value[3] * 1e6 for key, value in functions.items() if _is_ours(key)}
    for callee, (_calls, _primitive, _total, _cumulative, callers) in functions.items():
        for caller, (_, _, _, cumulative) in callers.items() if callee in own_us else ():
            if caller in own_us and caller != callee:
                own_us[caller] -= cumulative * 1e6
    rows = [
        {
            "function": f"{_module(key[0])} {key[2]}",
            "calls": round(functions[key][1] / num_steps, 2),
            "us": round(us / num_steps, 2),
        }
        for key, us in own_us.items()
        if functions[key][1] >= num_steps / 2
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _is_ours(function: tuple[str, int, str]) -> bool:
    return f"{os.sep}keepstep{os.sep}" in function[0]


def _module(path: str) -> str:
    return path.rpartition(f"{os.sep}keepstep{os.sep}")[2]


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all sizes on all numbers of ranks, and the profile of the shortest step."""
    sizes, profiles = [], {}
    shapes = {step_ms: calibrated(step_ms, *SHAPES[step_ms]) for step_ms in args.step_ms}
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        for num_ranks in args.ranks:
            for step_ms, shape in shapes.items():
                console.print(f"steps of {step_ms} ms on {num_ranks} rank(s) ...", highlight=False)
                sizes.append(measure_one(shape, step_ms, num_ranks, args, Path(name)))
        if args.profiled_steps:
            shape = shapes[min(shapes)]
            profiles = {
                "step_ms": min(shapes),
                "ranks": max(args.ranks[:2]),
                "rows": profiled(shape, max(args.ranks[:2]), args.profiled_steps, Path(name)),
            }
    return {"sizes": sizes, "profile": profiles}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables."""
    rows = []
    for size in result["sizes"]:
        plain, kept = (size["median_ms"][kind] for kind in KINDS)
        more = {key: statistics.median(values) for key, values in size["more"].items()}
        low, high = turns.interval(size["more"]["median_ms"])
        rows.append(
            [
                f"{size['step_ms']} ms, {size['ranks']} rank{'s' if size['ranks'] > 1 else ''}",
                f"{plain:.2f}",
                f"{kept:.2f}",
                f"{more['median_ms']:+.2f} ({low:+.2f} to {high:+.2f})",
                f"{100 * more['median_ms'] / plain:+.1f} %",
                f"{more['tenth_ms']:+.2f}",
                f"{more['cpu_ms']:+.2f}",
                f"{size['start_s']['torchrun']:.1f}, {size['start_s']['keepstep']:.1f}",
                f"{size['launcher_cpu_percent']['keepstep'] - size['launcher_cpu_percent']['torchrun']:+.1f}",
            ]
        )
    columns = (
        "step",
        "torchrun",
        "keepstep",
        "more (95 %)",
        "of a step",
        "more, 10th pct.",
        "more CPU",
        "start, s",
        "launcher, % core",
    )
    notes = [
        f"Milliseconds per step; both jobs started {len(result['sizes'][0]['more']['median_ms'])} times for each line. "
        "more: keepstep's median step less torchrun's, of jobs that took turns; the median of all starts. 10th "
        "percentile: the same of each start's tenth percentile.",
        "more CPU: processor time of all ranks. start: from the command until all ranks are at their first step, "
        "under torchrun and under keepstep. launcher: what `keepstep run` used more than torchrun, in percent of "
        "a core; both run all the time, also in the other's turns.",
    ]
    found = [Section("What a step takes", columns, rows, notes)]
    if profile := result["profile"]:
        parts = [[row["function"], f"{row['calls']:g}", f"{row['us']:.1f}"] for row in profile["rows"][:25]]
        total = sum(row["us"] for row in profile["rows"])
        notes = [
            f"Steps of {profile['step_ms']} ms on {profile['ranks']} rank(s), the training thread of rank 0. A wait "
            "for other ranks is in the function that waits.",
            f"All of keepstep's functions together: {total:.0f} µs a step under the profiler, which itself takes about "
            "half of that.",
        ]
        found.append(Section("Where it goes", ("function", "calls", "µs a step"), parts, notes))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("The cost of a step without failures", result)
    shapes = "".join(
        f"* A step of {step_ms} ms: {depth} layers of {width}, AdamW.\n" for step_ms, (width, depth) in SHAPES.items()
    )
    head += shapes + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = page.provenance("overhead.py")
    return page.carry_out("overhead", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
