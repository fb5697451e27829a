"""Part b of `benchmarks/snapshots.py`: kills a rank of FSDP2, whose shard no other rank holds.

Under keepstep the rank is restored from its snapshot in memory; under torchrun all ranks restart from DCP's newest
checkpoint. Every series is a separate job, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from jobs import Event, RunningJob, read_events, step_intervals_s
from page import Section

WORKER = Path(__file__).with_name("train_sharded.py")
RANKS = 4
STEPS_BEFORE = 5
"""Steps that all ranks complete before the next kill, and before the end. By then a new spare is warm."""
DEADLINE_S = 180.0
SERIES = {
    "keepstep, FSDP2, model before the mesh": ("--keepstep",),
    "keepstep, FSDP2, mesh before the model": ("--keepstep", "--mesh-first"),
    "keepstep, DDP": ("--keepstep", "--parallel", "ddp"),
    "torchrun, FSDP2, DCP in each step": (),
}


def measure(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Measures one series after the other."""
    found = {}
    for number, name in enumerate(args.series):
        folder = root / str(number)
        folder.mkdir()
        found[name] = one_series(SERIES[name], args, folder)
    return found


def one_series(options: tuple[str, ...], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one job, and returns the cost of each kill in it. Its model has ``args.depth`` blocks for each rank."""
    sizes = ["--width", str(args.width), "--depth", str(args.depth * RANKS), "--seed", str(args.seed)]
    worker = [str(WORKER), "--events", str(folder), *sizes, *options]
    report = folder / "report.json"
    if "--keepstep" in options:
        flags = ["--nproc-per-node", str(RANKS), "--spares", "1", "--report", str(report)]
        command = [sys.executable, "-m", "keepstep.cli.main", "run", *flags, *worker]
    else:
        (folder / "checkpoints").mkdir()
        flags = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(args.kills)]
        worker += ["--checkpoints", str(folder / "checkpoints")]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, *worker]
    chance = random.Random(args.seed)
    with RunningJob(command, folder) as job:
        kills = [kill(job, chance) for _ in range(args.kills)]
        some_steps(job)  # by then the report contains the first step of the last recovery
    steps_s = step_intervals_s(read_events(folder), after_step=2)
    parts = _parts(report) if report.exists() else []
    return {"kills": kills, "parts": parts, "step_ms": 1000 * statistics.median(steps_s)}


def kill(job: RunningJob, chance: random.Random) -> dict[str, Any]:
    """Kills a rank at a random time in a step, and waits until all have completed another step."""
    some_steps(job)
    events = read_events(job.folder)
    time.sleep(chance.uniform(0.0, statistics.median(step_intervals_s(events))))
    rank = chance.randrange(RANKS)
    pid = next(int(event.value) for event in reversed(events) if event.rank == rank and event.what == "start")
    at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    attempt = max(event.attempt for event in events)
    job.wait_until(lambda: _num_completed(read_events(job.folder), attempt) >= 1, "a step after a kill", DEADLINE_S)
    events = [event for event in read_events(job.folder) if event.what == "step"]
    before = max(int(event.value) for event in events if event.attempt <= attempt)
    after = [next(each for each in events if each.attempt > attempt and each.rank == rank) for rank in range(RANKS)]
    resumed_at = int(min(event.value for event in after))
    gap_ms = 1000 * (max(event.at_s for event in after) - at_s)
    return {"gap_ms": gap_ms, "again": before + 1 - resumed_at + 1}


def some_steps(job: RunningJob) -> None:
    """Waits until all ranks have completed some steps after the last kill."""
    job.wait_until(lambda: _num_completed(read_events(job.folder)) >= STEPS_BEFORE, "steps after a kill", DEADLINE_S)


def _num_completed(events: list[Event], after: int | None = None) -> int:
    """Returns how many steps every rank has completed in the newest attempt, or in all attempts after a given one."""
    if after is None:
        after = max((event.attempt for event in events), default=0) - 1
    of_ranks = [event.rank for event in events if event.what == "step" and event.attempt > after]
    return min(of_ranks.count(rank) for rank in range(RANKS))


def _parts(report: Path) -> list[dict[str, float]]:
    """Returns for each recovery its milliseconds, without the first step's own time, and the time of its transfers.

    A recovery that another loss has superseded has no end of its own.
    """
    recoveries = json.loads(report.read_text(encoding="utf-8"))["recoveries"]
    recoveries = [each for each in recoveries if not each["superseded"]]
    parts = [each["milliseconds"] | {"first_step": each["first_step_ms"]} for each in recoveries]
    return [{"restore": each["restore"], "rest": each["gap"] - each["first_step"] - each["restore"]} for each in parts]


def section(result: dict[str, Any]) -> Section:
    """Returns the table."""
    rows = []
    for name, series in result.items():
        gaps_ms = [each["gap_ms"] for each in series["kills"]]
        again = [each["again"] for each in series["kills"]]
        columns = [f"{series['step_ms']:,.0f}", f"{statistics.median(gaps_ms):,.0f}"]
        columns.append(f"{statistics.median(gaps_ms) - series['step_ms']:,.0f}")
        for part in ("restore", "rest"):
            of_kills = [each[part] for each in series["parts"]]
            columns.append(f"{statistics.median(of_kills):,.0f}" if of_kills else "-")
        rows.append([name, str(len(gaps_ms)), *columns, f"{statistics.median(again):g} (≤ {max(again)})"])
    notes = [
        "Medians, in milliseconds. gap: from the kill until all ranks have completed a step again. restore: state that "
        "is loaded or received. rest: the gap without restore and the step's own time.",
        "again: steps computed again, the broken one included. keepstep takes a snapshot in each step; torchrun's "
        "ranks save in each step, and wait for the former checkpoint to be on disk before.",
        "model before the mesh: the same lines in another order. A spare waits where the mesh is made: with its model "
        "built before, or not.",
    ]
    columns_of = ("system", "kills", "a step", "gap", "without a step", "restore", "rest", "again")
    return Section("A rank of four is lost", columns_of, rows, notes)
