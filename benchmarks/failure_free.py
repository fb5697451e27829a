"""Part C of `benchmarks/recovery.py`: the step time without failures, keepstep against plain DDP with gloo.

Two ways, because a shared machine's speed drifts by more than what is to be measured:

*runs*: whole jobs, one after the other: plain, kept, plain, kept ... Each gives its median step time, each pair a
ratio. Everything that runs beside the steps is in it: keepstep's agent and its spare, torchrun's agent.

*turns*: both jobs at once, of which one trains for a few steps while the other waits before its next step. The two
sides of a pair then lie a second or two apart. What runs beside the steps is on both sides of the ratio, so the
processor time that each launcher took is printed next to it.

Beside the time of a step stands the processor time that its ranks took for it: other programs on the machine disturb
that much less, but it does not see time that a rank only waits.
"""

from __future__ import annotations

import os
import select
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from jobs import Event, RunningJob, Workload, cpu_per_step_s, median_step_s, pipes, read_events

KINDS = ("plain", "keepstep")
WARM_UP_STEPS = 5
"""Not counted at the start of a run: allocation, the page cache, and DDP's first layout of its buckets."""
WARM_UP_TURNS = 1


class Side(NamedTuple):
    """One half of a pair, in milliseconds per step."""

    step_ms: float
    cpu_ms: float


def measure_runs(workload: Workload, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Whole runs in alternation, the one that comes first changing from pair to pair.

    Returns:
        per pair the median step time of both in milliseconds, their ratio (keepstep / plain), and the same for the
        processor time of a step, all ranks together.

    Raises:
        JobFailed: a run failed.
    """
    pairs = []
    for number in range(num_pairs):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        sides = {kind: _run(workload, kind, num_steps) for kind in order}
        pairs.append(_pair(sides["plain"], sides["keepstep"]))
    return {"pairs": pairs, "steps_per_run": num_steps}


def _run(workload: Workload, kind: str, num_steps: int) -> Side:
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        with RunningJob(_command(workload, kind, folder, "--steps", str(num_steps)), folder) as job:
            job.wait(workload.deadline_s)
        events = read_events(folder)
    first = min(WARM_UP_STEPS, num_steps - 2)
    return Side(median_step_s(events, after_step=first) * 1000, cpu_per_step_s(events, after_step=first) * 1000)


def measure_turns(workload: Workload, num_pairs: int, block: int) -> dict[str, Any]:
    """Two jobs that take turns of ``block`` steps; the first step of each turn is not counted.

    Returns:
        as `measure_runs`, and the processor time of each launcher in percent of one core.

    Raises:
        JobFailed: a job failed, or did not take its turn in time.
    """
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name, ExitStack() as stack:
        turns = {kind: _Turns(workload, kind, Path(name) / kind, block, stack) for kind in KINDS}
        for number in range(WARM_UP_TURNS + num_pairs):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                turns[kind].take()
        cpu_percent = {kind: turns[kind].launcher_cpu_percent() for kind in KINDS}
        blocks = {kind: turns[kind].blocks()[WARM_UP_TURNS:] for kind in KINDS}
    pairs = [_pair(plain, kept) for plain, kept in zip(blocks["plain"], blocks["keepstep"], strict=True)]
    return {"pairs": pairs, "steps_per_turn": block, "launcher_cpu_percent": cpu_percent}


class _Turns:
    """One of the two jobs, standing before its next block of steps."""

    def __init__(self, workload: Workload, kind: str, folder: Path, block: int, stack: ExitStack) -> None:
        folder.mkdir()
        self._workload, self._kind, self._folder, self._block = workload, kind, folder, block
        names = ["arrived", *(f"go-{rank}" for rank in range(workload.world_size))]
        self._pipes = stack.enter_context(pipes(folder, names))
        command = _command(workload, kind, folder, "--gate", str(folder), "--block", str(block))
        self._job = stack.enter_context(RunningJob(command, folder))
        self._wait_for_all()
        self._begun_s, self._cpu_before_s = time.monotonic(), self._job.cpu_now_s()

    def take(self) -> None:
        """Lets every rank train one block, and waits until all stand before the next."""
        for name, descriptor in self._pipes.items():
            if name != "arrived":
                os.write(descriptor, b"x")
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        end_s = time.monotonic() + self._workload.deadline_s
        for _ in range(self._workload.world_size):
            while not select.select([self._pipes["arrived"]], [], [], 1.0)[0]:
                self._job.check_alive(f"{self._kind}: a turn")
                if time.monotonic() > end_s:
                    raise self._job.failure(f"{self._kind}: a turn took more than {self._workload.deadline_s:g} s")
            os.read(self._pipes["arrived"], 1)

    def launcher_cpu_percent(self) -> float:
        """Processor time of the launcher since the first turn, in percent of one core."""
        used_s = self._job.cpu_now_s() - self._cpu_before_s
        return round(100 * used_s / (time.monotonic() - self._begun_s), 2)

    def blocks(self) -> list[Side]:
        """Each block's median step time and processor time, from the second step on."""
        blocks: dict[int, list[Event]] = {}
        for event in read_events(self._folder):
            if event.what == "step":
                blocks.setdefault(int(event.value) // self._block, []).append(event)
        return [Side(median_step_s(block) * 1000, cpu_per_step_s(block) * 1000) for block in blocks.values()]


def _command(workload: Workload, kind: str, folder: Path, *more: str) -> list[str]:
    worker = workload.worker_arguments(folder, *more)
    return workload.keepstep(worker) if kind == "keepstep" else workload.torchrun(worker)


def _pair(plain: Side, kept: Side) -> dict[str, float]:
    return {
        "plain_ms": round(plain.step_ms, 3),
        "keepstep_ms": round(kept.step_ms, 3),
        "ratio": round(kept.step_ms / plain.step_ms, 4),
        "plain_cpu_ms": round(plain.cpu_ms, 3),
        "keepstep_cpu_ms": round(kept.cpu_ms, 3),
        "cpu_ratio": round(kept.cpu_ms / plain.cpu_ms, 4),
    }
