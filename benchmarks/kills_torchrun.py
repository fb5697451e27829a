"""Part B of `benchmarks/recovery.py`: ranks of the same job under torchrun are killed at random instants.

The script saves a checkpoint every ten steps on rank 0 and loads it when it starts; torchrun ends the other ranks and
starts all of them again. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set for it: with torchrun's defaults the ranks of all
restarts share one TCPStore without a prefix, so that with gloo they read the addresses of dead processes, and a restart
can fail.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import Event, RunningJob, Workload, median_step_s, read_events

CHECKPOINT_EVERY = 10


def measure(workload: Workload, num_kills: int) -> dict[str, Any]:
    """Runs one job, kills ``num_kills`` ranks in it, and returns a row for each and the times of step and checkpoint.

    Raises:
        JobFailed: the job ended, or did not come as far as it should.
    """
    generator = random.Random(workload.seed)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        saving = ["--checkpoint", str(folder / "checkpoint.pt"), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        command = workload.torchrun(workload.worker_arguments(folder, *saving), max_restarts=num_kills + 3)
        with RunningJob(command, folder) as job:
            rows = [_kill(job, workload, number, generator) for number in range(num_kills)]
        events = read_events(folder)
    saves = [event.value for event in events if event.what == "save"]
    return {
        "kills": rows,
        "step_ms": round(median_step_s(events, after_step=3) * 1000, 3),
        "checkpoint_every": CHECKPOINT_EVERY,
        "checkpoint_ms": round(statistics.median(saves), 3) if saves else None,
    }


def _kill(job: RunningJob, workload: Workload, number: int, generator: random.Random) -> dict[str, Any]:
    """Kills one rank, at an instant drawn evenly from the steps between two checkpoints."""
    attempt = _attempt(read_events(job.folder))

    def first_steps() -> list[Event]:
        return _first_steps(read_events(job.folder), attempt)

    job.wait_until(lambda: len(first_steps()) == workload.world_size, f"kill {number + 1}", workload.deadline_s)
    from_s = time.monotonic()
    warm = job.folder / "checkpoint.pt"
    job.wait_until(warm.exists, "the first checkpoint", workload.deadline_s)
    step_s = median_step_s(read_events(job.folder), after_step=3)
    strike_s = max(from_s, time.monotonic()) + generator.uniform(0.0, CHECKPOINT_EVERY * step_s)
    job.wait_until(lambda: time.monotonic() >= strike_s, "the kill", workload.deadline_s)
    rank = generator.randrange(workload.world_size)
    pid = job.workers()[rank]
    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    before = [event for event in read_events(job.folder) if event.rank == rank and event.what == "step"]
    attempt += 1
    what = f"the first step after kill {number + 1}"
    job.wait_until(lambda: len(first_steps()) == workload.world_size, what, workload.deadline_s)
    firsts = first_steps()
    events = read_events(job.folder)
    started_s = max(event.at_s for event in events if event.what == "start" and event.attempt == firsts[0].attempt)
    resumed_s = max(event.at_s for event in firsts)
    was_in_step = before[-1].value + 1
    return {
        "rank": rank,
        "gap_ms": round((resumed_s - at_s) * 1000, 3),
        "step_ms": round(median_step_s(events, after_step=3) * 1000, 3),
        "recovery_ms": round((resumed_s - at_s - median_step_s(events, after_step=3)) * 1000, 3),
        "restart_ms": round((started_s - at_s) * 1000, 3),
        "steps_again": int(was_in_step + 1 - min(event.value for event in firsts)),
    }


def _attempt(events: list[Event]) -> int:
    return max((event.attempt for event in events), default=0)


def _first_steps(events: list[Event], attempt: int) -> list[Event]:
    """The first step of each rank in an attempt, or in the latest one if that failed to start and was made again."""
    latest = max(attempt, _attempt(events))
    firsts: dict[int, Event] = {}
    for event in events:
        if event.attempt == latest and event.what == "step":
            firsts.setdefault(event.rank, event)
    return list(firsts.values())
