"""The drill: the user's own job once without failures and once with, and whether every bit came out the same."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from keepstep.drill.faults import Fault, fired_at, write_plan
from keepstep.drill.injector import OutsideInjector
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.launcher.job import Job, JobOptions, run_job
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.record import runfolder
from keepstep.trace.timeline.describe import describe_recovery

OBSERVER = "keepstep.drill.inject:install"
REFERENCE, STRUCK = "reference", "with-faults"
"""The folders of the two runs."""
OnProgress = Callable[[str, Job], Awaitable[None]]


class DrillFailed(KeepstepError):
    """A run of the drill did not come to its end, so that there is nothing to compare."""


@dataclasses.dataclass
class Run:
    """One of the two runs."""

    report: dict[str, Any]
    records: list[RecoveryRecord]
    step_ms: float | None
    injector: OutsideInjector

    @property
    def digest(self) -> str:
        """The digest that all ranks share, or how they differ."""
        found = self.report["digests"]
        kinds = sorted(set(found.values()))
        return kinds[0] if len(kinds) == 1 else " ".join(f"rank{rank}:{digest}" for rank, digest in found.items())


def run_drill(options: JobOptions, faults: list[Fault], on_progress: OnProgress, folder: Path) -> dict[str, Any]:
    """Runs the job twice and returns the drill's result, as ``--json`` writes it.

    Args:
        options: the job.
        faults: what happens to it the second time.
        on_progress: accompanies each of the runs.
        folder: below it each of them gets its own, `REFERENCE` and `STRUCK`; those of an earlier drill are moved aside.

    Raises:
        DrillFailed: the run without failures failed by itself.
        ConfigurationError: the job cannot be run as asked.
    """
    for name in (REFERENCE, STRUCK):
        if runfolder.is_occupied(folder / name):
            raise ConfigurationError(f"--run-dir {folder}: another drill is running there; name another folder")
    runfolder.move_aside(folder, (REFERENCE, STRUCK))
    reference = _run(options, folder / REFERENCE, [], on_progress)
    if reference.report["exit_code"] != 0 or not reference.report["digests"]:
        raise DrillFailed(f"the run without failures did not come to its end: {reference.report['reason']}")
    struck = _run(options, folder / STRUCK, faults, on_progress)
    return _compare(reference, struck, faults, folder / STRUCK)


def _run(options: JobOptions, directory: Path, faults: list[Fault], on_progress: OnProgress) -> Run:
    directory.mkdir()
    write_plan(directory, faults)
    agent = dataclasses.replace(
        options.agent, run_dir=directory, digest=True, observer=OBSERVER, checkpoint_root=str(directory)
    )
    seen: list[Job] = []
    injector = OutsideInjector(faults)
    title = "with failures" if faults else "without failures"

    async def accompany(job: Job) -> None:
        seen.append(job)
        await asyncio.gather(injector.accompany(job), on_progress(title, job))

    outputs = dataclasses.replace(options.outputs, report=None, trace=options.outputs.trace if faults else None)
    result = run_job(dataclasses.replace(options, agent=agent, outputs=outputs, keep_run_dir=True), accompany)
    if not seen:
        raise DrillFailed(f"the run {title} did not begin: {result['reason']}")
    durations = seen[0].agent.step_durations_s
    step_ms = round(statistics.median(durations) * 1000, 3) if durations else None
    return Run(result, seen[0].controller.job.records, step_ms, injector)


def _compare(reference: Run, struck: Run, faults: list[Fault], directory: Path) -> dict[str, Any]:
    outside = struck.injector.fired
    rows = [_row(fault, at_s, rank, struck.records) for fault, at_s, rank in outside]
    missed = []
    for fault in faults:
        if fault.in_worker:
            at_s = fired_at(directory, fault)
            if at_s is None:
                missed.append(str(fault))
            else:
                rows.append(_row(fault, at_s, fault.rank, struck.records))
        elif (came := sum(1 for entry in outside if entry[0] is fault)) < fault.count:
            missed.append(f"{fault} ({came} of {fault.count} came about)")
    identical = struck.report["exit_code"] == 0 and bool(struck.report["digests"]) and reference.digest == struck.digest
    return {
        "identical": identical and " " not in reference.digest,
        "reference_digest": reference.digest,
        "digest": struck.digest,
        "exit_code": struck.report["exit_code"],
        "reason": struck.report["reason"],
        "faults": sorted(rows, key=lambda row: row["at_s"]),
        "missed": missed,
        "step_ms": reference.step_ms,
        "recoveries": struck.report["recoveries"],
    }


def _row(fault: Fault, at_s: float, rank: int | None, records: list[RecoveryRecord]) -> dict[str, Any]:
    """What became of one fault. A recovery that a further failure cut short ends with the one that took over."""
    record = next(
        (
            r
            for r in records
            if any(f.rank == rank and f.since_s >= at_s - 0.5 and r.begun_s >= at_s for f in r.failures)
        ),
        None,
    )
    row: dict[str, Any] = {
        "fault": fault.kind,
        "at_s": at_s,
        "phase": fault.phase or (f"during {fault.during}" if fault.during else None),
        "rank": rank,
        "resume_step": None,
        "steps_recomputed": None,
    }
    parts = describe_recovery(record)["milliseconds"] if record else {}
    row |= {f"{name}_ms": parts.get(name) for name in ("stop", "decide", "reset", "restore", "resume")}
    row |= {"detect_ms": None, "gap_ms": None, "first_step_ms": None}
    if record is not None:
        ended = next((r for r in records if r.generation >= record.generation and r.resumed_s is not None), None)
        row["phase"] = (
            next((f.phase for f in record.failures if f.rank == rank), None)
            if fault.phase == "random"
            else row["phase"]
        )
        row["detect_ms"] = round((record.begun_s - at_s) * 1000, 3)
        if ended is not None and ended.resumed_s is not None:
            row["resume_step"], row["steps_recomputed"] = ended.resume_step, ended.steps_recomputed
            row["gap_ms"] = round((ended.resumed_s - at_s) * 1000, 3)
            row["first_step_ms"] = round((ended.first_step_s or 0.0) * 1000, 3)
    return row
