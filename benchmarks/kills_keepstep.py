"""The kills of `benchmarks/recovery.py`: kills ranks of a keepstep job at random times.

The job runs in this process (controller and agent) and its children (workers). The warm spare takes a killed rank.
Then another spare starts, which takes about a second to build its model. In the first series each kill waits until that
spare is warm, as in a job that rarely fails. In the second series the kill does not wait, so the recovery must.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import JobFailed, Workload, read_events, step_intervals_s, tail

from keepstep.launcher.flags import job_options, make_parser
from keepstep.launcher.job import Job, run_job
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.records import RecoveryRecord

POLL_INTERVAL_S = 0.005
SPREAD_STEPS = 4.0
"""A kill happens at a uniformly random time, at most this many steps after the job is ready for it."""
ENDED_BY_US = 128 + signal.SIGINT


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill that has been executed."""

    at_s: float
    rank: int
    spare_was_ready: bool


class Killer:
    """Runs next to a job, kills its ranks one after the other, and finally ends the job."""

    def __init__(self, folder: Path, num_kills: int, wait_for_spare: bool, workload: Workload) -> None:
        self.kills: list[Kill] = []
        self.records: list[RecoveryRecord] = []
        self.problem: str | None = None
        self._folder = folder
        self._num_kills = num_kills
        self._wait_for_spare = wait_for_spare
        self._workload = workload
        self._random = random.Random(f"{workload.seed} {wait_for_spare}")

    async def accompany(self, job: Job) -> None:
        """Runs beside the job; see `keepstep.launcher.job.run_job`."""
        self.records = job.controller.job.records
        try:
            for number in range(self._num_kills):
                await self._until(f"kill {number + 1} can come", lambda: self._may_strike(job))
                await asyncio.sleep(self._random.uniform(0.0, SPREAD_STEPS * self._step_s()))
                known = len(self.records)
                self._strike(job)
                await self._until(f"kill {number + 1} is noticed", lambda known=known: len(self.records) > known)
            await self._until("the recovery from the last kill", lambda: self._may_strike(job))
            await self._until("the job trains on", lambda: self._all_beyond(job, num_steps=2))
        except TimeoutError as error:
            self.problem = str(error)
        os.kill(os.getpid(), signal.SIGINT)  # `run_job` ends the job on it at once, and reports

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + self._workload.deadline_s
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not within {self._workload.deadline_s:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)

    def _may_strike(self, job: Job) -> bool:
        machine = job.controller.job
        if machine.stage is not Stage.TRAINING or not machine.progress.trained_to:
            return False
        if machine.records and (machine.records[-1].resumed_s is None or not self._all_beyond(job, num_steps=1)):
            return False
        return not self._wait_for_spare or self._has_warm_spare(job)

    @staticmethod
    def _has_warm_spare(job: Job) -> bool:
        return any(spare.ready is not None for spare in job.controller.job.roster.spares())

    @staticmethod
    def _all_beyond(job: Job, num_steps: int) -> bool:
        """Returns whether every rank has completed ``num_steps`` since the last recovery and has begun another."""
        begun_at = job.controller.job.records[-1].resume_step or 0
        steps = [worker["step"] for worker in job.agent.status() if worker["rank"] is not None]
        return all(isinstance(step, int) and step >= begun_at + num_steps for step in steps)

    def _step_s(self) -> float:
        intervals = sorted(step_intervals_s(read_events(self._folder)))
        return intervals[len(intervals) // 2] if intervals else 0.1

    def _strike(self, job: Job) -> None:
        rank = self._random.randrange(self._workload.world_size)
        pid = next(worker["pid"] for worker in job.agent.status() if worker["rank"] == rank)
        assert isinstance(pid, int)
        spare = self._has_warm_spare(job)
        self.kills.append(Kill(time.monotonic(), rank, spare))
        os.kill(pid, signal.SIGKILL)


def measure(workload: Workload, num_kills: int, wait_for_spare: bool) -> dict[str, Any]:
    """Runs one job, kills ``num_kills`` ranks in it, and returns a row for each and the step time of the job.

    Raises:
        JobFailed: the job ended early, or did not complete the expected steps.
    """
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        flags = ["--nproc-per-node", str(workload.world_size), "--spares", "1", "--redirects", "3"]
        flags += ["--run-dir", str(folder / "run"), "--log-dir", str(folder / "logs")]
        command = [*flags, *workload.worker_arguments(folder), "--keepstep"]
        killer = Killer(folder, num_kills, wait_for_spare, workload)
        report = run_job(job_options(make_parser("keepstep run").parse_args(command)), killer.accompany)
        if killer.problem is not None or report["exit_code"] != ENDED_BY_US:
            logs = "\n".join(tail(path, 8) for path in sorted((folder / "logs").rglob("*.log")))
            raise JobFailed(f"keepstep: {killer.problem or report['reason']}\n{logs}")
        events = read_events(folder)
    step_ms = sorted(interval * 1000 for interval in step_intervals_s(events, after_step=3))
    moved_ms = {event.attempt: event.value for event in events if event.what == "moved"}
    rows = [_row(kill, killer.records, moved_ms) for kill in killer.kills]
    return {"kills": rows, "step_ms": round(step_ms[len(step_ms) // 2], 3) if step_ms else None}


def _row(kill: Kill, records: list[RecoveryRecord], moved_ms: dict[int, float]) -> dict[str, Any]:
    """Returns the cost of a kill. A recovery that another failure has superseded ends with its successor.

    ``moved_ms``: generation -> time in which the state moved.
    """
    begun = next(record for record in records if record.begun_s >= kill.at_s)
    ended = next(record for record in records if record.begun_s >= kill.at_s and record.resumed_s is not None)
    assert ended.resumed_s is not None
    gap_ms = (ended.resumed_s - kill.at_s) * 1000
    step_ms = (ended.first_step_s or 0.0) * 1000
    parts = ended.milliseconds()
    resume_ms = parts["resume"] or 0.0
    gone_s = next((failure.since_s for failure in begun.failures if failure.rank == kill.rank), begun.begun_s)
    return {
        "phase": next((failure.phase for failure in begun.failures if failure.rank == kill.rank), None),
        "spare_was_ready": kill.spare_was_ready,
        "gap_ms": round(gap_ms, 3),
        "step_ms": round(step_ms, 3),
        "recovery_ms": round(gap_ms - step_ms, 3),
        "bytes_ms": round(moved_ms[ended.generation], 3),
        "steps_again": ended.steps_recomputed,
        "die_ms": round((gone_s - kill.at_s) * 1000, 3),
        "detect_ms": round((begun.begun_s - gone_s) * 1000, 3),
        **{f"{part}_ms": parts[part] for part in ("stop", "decide", "reset", "restore")},
        "resume_ms": round(resume_ms - step_ms, 3),
        "received_bytes": ended.received_bytes,
    }
