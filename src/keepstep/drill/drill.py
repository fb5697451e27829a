"""The drill: runs the user's job without and with failures, and compares the state bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from keepstep.agent.settings import AgentSettings
from keepstep.drill.explanation import RecordedRun, began_later, explain, unrecorded
from keepstep.drill.faults import DrillFault, default_faults, fired_at, weather, write_plan
from keepstep.drill.files import compare_files, first_written_s
from keepstep.drill.logs import end_of_logs
from keepstep.drill.outside_injector import OutsideInjector
from keepstep.drill.records import HOLDS_NAN, STATE_DICTS, States, places_of, read_states
from keepstep.drill.workdir import make_working_dir
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.launcher.job import Job, JobOptions, run_job
from keepstep.protocol.messages import Cause
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.record import runfolder
from keepstep.trace.timeline.describe import describe_recovery

OBSERVER = "keepstep.drill.worker_injector:install"
REFERENCE, STRUCK, REPEATED = "reference", "with-faults", "repeated"
"""Folder names of the first run, of a second run with faults, and of a second run without faults."""
TITLES = {REFERENCE: "without failures", STRUCK: "with failures", REPEATED: "without failures, again"}
WORKING_DIR = "work"
"""The working directory of a run below its folder, if files are compared."""
_TIMES = 4
"""How many times as long as the run without failures one with default faults takes at most, about."""
_START_SHARE = 0.5
"""The time that a kill costs, as a share of the time from a run's start to its first step, at most: spares are forked
from a process that has imported torch. It was 0.25 to 0.4 for two scripts of tests/scripts (2 cores, 2026-11-29)."""
CLOSE_S = 0.5
"""How long before the fault the agent may date the loss of a rank: it dates a hang at the rank's last progress."""
OnProgress = Callable[[str, Job], Awaitable[None]]


class DrillFailed(KeepstepError):
    """A run of the drill did not complete, so that there is nothing to compare."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drill:
    """The settings of a drill, besides those of the job."""

    faults: list[DrillFault] | None = None
    """Faults of the second run; may be empty. None: they are chosen from the first run: `weather`, or
    `default_faults`."""
    is_weather: bool = False
    """Whether the faults are pauses of which none may cost the job a rank."""
    patterns: tuple[str, ...] = ()
    """Patterns of the files to compare. If there are any, each run has its own working directory."""

    awaits_spares: bool = True
    """Whether a fault waits until a spare is warm."""

    @property
    def second(self) -> str:
        """Folder name of the second run."""
        return STRUCK if self.faults is None or self.faults else REPEATED

    def chosen(self, options: JobOptions, first: DrillRun, working_dir: Path) -> list[DrillFault]:
        """Returns the faults for a job after its first run, which had this working directory."""
        if self.faults is not None:
            return self.faults
        recovery = options.recovery
        if self.is_weather:
            return weather(recovery.world_size, first.num_steps, recovery.deadlines.hang_after_s)
        kill_s = _START_SHARE * first.start_s  # each costs a process that starts
        most = int((_TIMES - 1) * first.whole_s / kill_s)
        written = first.step_after(first_written_s(working_dir, self.patterns))
        return default_faults(recovery.world_size, places_of(first.states), most=most, written=written)


@dataclasses.dataclass
class DrillRun:
    """The results of one of the two runs."""

    report: dict[str, Any]
    records: list[RecoveryRecord]
    step_ms: float | None
    injector: OutsideInjector
    states: States
    began_s: float
    """When it was started, in monotonic seconds."""
    whole_s: float
    """How long it took, in seconds."""
    log: list[str]
    """The end of its logs, if it did not reach its own; see `end_of_logs`."""

    @property
    def num_steps(self) -> int:
        """Number of its steps."""
        return max((max(steps) for steps in self.states.values() if steps), default=0)

    @property
    def start_s(self) -> float:
        """Seconds from its start to its first step."""
        begins = [min(state.at_s for state in steps.values()) for steps in self.states.values() if steps]
        return min(begins, default=self.began_s + self.whole_s) - self.began_s

    def step_after(self, at_s: float | None) -> int | None:
        """The first step that rank 0 began after a time; None if there is none."""
        own = self.states.get(0, {})
        return next((step for step in sorted(own) if at_s is not None and own[step].at_s > at_s), None)

    @property
    def digest(self) -> str:
        """The common digest of all ranks; else the digest of each shard; else, if replicas differ, of each rank."""
        found = self.report["digests"]
        kinds = {(self._shard_of(rank), digest): None for rank, digest in found.items()}
        if not self.replicas_agree:
            return " ".join(f"rank{rank}:{digest}" for rank, digest in found.items())
        if len(kinds) == 1:
            return str(next(iter(found.values())))
        return " ".join(f"shard{shard}:{digest}" for shard, digest in sorted(kinds))

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks of each shard have the same digest."""
        found = self.report["digests"]
        kinds = {(self._shard_of(rank), digest) for rank, digest in found.items()}
        return len(kinds) == len({shard for shard, _digest in kinds})

    def _shard_of(self, rank: str) -> int:
        return int(self.report["shards"].get(rank, 0))

    @property
    def nan(self) -> list[str]:
        """The tensors that hold NaN after the last step, on any rank."""
        last = [steps[max(steps)] for steps in self.states.values()]
        pairs = [pair for state in last for pair in zip(state.names, state.digests, strict=True)]
        return list(dict.fromkeys(name for name, digest in pairs if digest.startswith(HOLDS_NAN)))

    @property
    def recorded(self) -> RecordedRun:
        """The part of the results that an explanation needs."""
        return RecordedRun(self.states, self.report["digests"], self.report["reason"], self.report["shards"])


def run_drill(options: JobOptions, drill: Drill, on_progress: OnProgress, folder: Path) -> dict[str, Any]:
    """Runs the job twice and returns the drill's result, as ``--json`` writes it.

    Args:
        options: the job.
        drill: the faults of the second run, and the files to compare.
        on_progress: a coroutine function that runs next to each of the runs, with its title and job.
        folder: the folder of the drill. Each run gets its own folder below it: `REFERENCE` and ``drill.second``. Those
            of an earlier drill are moved aside.

    Raises:
        DrillFailed: the run without failures failed, or the second run did not start.
        ConfigurationError: the job cannot run with these options, or another drill runs in the folder.
    """
    names = (REFERENCE, STRUCK, REPEATED)
    for name in names:
        if runfolder.is_occupied(folder / name):
            raise ConfigurationError(f"--run-dir {folder}: another drill is running there; name another folder")
    runfolder.move_aside(folder, names)
    folder = folder.resolve()  # as the script sees it
    first = _run(options, folder / REFERENCE, dataclasses.replace(drill, faults=[]), on_progress)
    if not is_through(first.report):
        what = "has no last state to compare" if first.report["exit_code"] == 0 else "did not reach its end"
        raise DrillFailed("\n".join([f"the run without failures {what}: {first.report['reason']}", *first.log]))
    drill = dataclasses.replace(drill, faults=drill.chosen(options, first, folder / REFERENCE / WORKING_DIR))
    second = _run(options, folder / drill.second, drill, on_progress)
    first_saved, second_saved = (folder / name / STATE_DICTS for name in (REFERENCE, drill.second))
    saved = compare_files(first_saved, second_saved, ("*",))
    difference = next((f"{file.file}: {file.difference}" for file in saved if file.difference is not None), None)
    if difference is None:  # they may be as large as the state of all ranks
        shutil.rmtree(first_saved)
        shutil.rmtree(second_saved)
    files = compare_files(folder / REFERENCE / WORKING_DIR, folder / drill.second / WORKING_DIR, drill.patterns)
    return _compare(first, second, drill, folder / drill.second, difference) | {
        "files": [dataclasses.asdict(file) for file in files]
    }


def _run(options: JobOptions, directory: Path, drill: Drill, on_progress: OnProgress) -> DrillRun:
    directory.mkdir()
    faults = drill.faults or []
    write_plan(directory, faults)
    output = options.agent.output
    if output.log_dir is not None:
        output = dataclasses.replace(output, log_dir=output.log_dir / directory.name)
    agent = dataclasses.replace(
        options.agent, run_dir=directory, digest=True, observer=OBSERVER, checkpoint_root=str(directory), output=output
    )
    if drill.patterns:
        agent = _in_its_own_place(agent, directory / WORKING_DIR, drill.patterns)
    seen: list[Job] = []
    injector = OutsideInjector(faults, awaits_spares=drill.awaits_spares)
    title = TITLES[directory.name] + "".join(f"{'; ' if n else ': '}{fault}" for n, fault in enumerate(faults))

    async def accompany(job: Job) -> None:
        seen.append(job)
        await asyncio.gather(injector.accompany(job), on_progress(title, job))

    is_second = directory.name != REFERENCE
    outputs = dataclasses.replace(options.outputs, report=None, trace=options.outputs.trace if is_second else None)
    began_s = time.monotonic()
    job = dataclasses.replace(options, agent=agent, outputs=outputs, keep_run_dir=True)
    result = run_job(job, accompany)
    if not seen:
        raise DrillFailed(f"the run {title} did not begin: {result['reason']}")
    durations = seen[0].agent.step_durations_s
    step_ms = round(statistics.median(durations) * 1000, 3) if durations else None
    whole_s = time.monotonic() - began_s
    machine = seen[0].controller.job
    lost = [number for number, worker in machine.roster.workers.items() if worker.lost]
    is_kept = options.keep_run_dir or output.log_dir is not None
    log = [] if is_through(result) else end_of_logs(job.log_dir, lost, names_file=is_kept)
    return DrillRun(result, machine.records, step_ms, injector, read_states(directory), began_s, whole_s, log)


def _in_its_own_place(agent: AgentSettings, working_dir: Path, patterns: tuple[str, ...]) -> AgentSettings:
    """Creates a run's own working directory. Returns the agent's settings with it and the script's absolute path."""
    make_working_dir(working_dir, patterns, Path.cwd())
    script, *arguments = agent.command
    if not agent.module and (not agent.raw or "/" in script):
        script = str(Path(script).absolute())
    return dataclasses.replace(agent, command=(script, *arguments), working_dir=working_dir)


def _compare(
    first: DrillRun, second: DrillRun, drill: Drill, directory: Path, difference: str | None
) -> dict[str, Any]:
    faults = drill.faults or []
    outside = second.injector.fired
    rows = [_row(fault, at_s, rank, second.records) for fault, at_s, rank in outside]
    missed = []
    for fault in faults:
        if fault.in_worker:
            at_s = fired_at(directory, fault)
            if at_s is None:
                missed.append(str(fault))
            else:
                rows.append(_row(fault, at_s, fault.rank, second.records))
        elif (came := sum(1 for entry in outside if entry[0] is fault)) < fault.count:
            missed.append(f"{fault} ({came} of {fault.count} happened)")
    rows.sort(key=lambda row: row["at_s"])
    for row in rows:
        resumed = second.states.get(0, {}).get(row["resume_step"])
        row["framework_step"] = resumed.framework_step if resumed is not None else None
    is_equal = is_through(second.report) and first.digest == second.digest and first.replicas_agree
    identical = is_equal and difference is None
    explanation = began_later(first.recorded, second.recorded)
    if explanation is None and not is_equal:
        explanation = explain(first.recorded, second.recorded, rows)
    elif explanation is None and difference is not None:
        explanation = unrecorded(difference)
    return {
        "identical": identical,
        "state_dicts": difference,
        "reference_digest": first.digest,
        "digest": second.digest,
        "exit_code": second.report["exit_code"],
        "reason": second.report["reason"],
        "log": second.log,
        "explanation": explanation.as_json() if explanation else None,
        "faults": rows,
        "missed": missed,
        "raised": own_exceptions(second.records, rows),
        "disturbed": [record.detail for record in second.records] if drill.is_weather else None,
        "nan": first.nan,
        "step_ms": first.step_ms,
        "recoveries": second.report["recoveries"],
    }


def is_through(report: dict[str, Any]) -> bool:
    """Whether all ranks have completed the last step of a run, by its report."""
    return report["exit_code"] == 0 and bool(report["digests"])


def is_good(result: dict[str, Any]) -> bool:
    """Whether a drill has passed: weights and files are identical, every fault was injected, no rank was lost by an
    exception of the script, and none by a pause that may not cost one."""
    files_are_equal = all(file["difference"] is None for file in result["files"])
    unexpected = result["missed"] or result["raised"] or result["disturbed"]
    return result["identical"] and not unexpected and files_are_equal


def own_exceptions(records: Sequence[RecoveryRecord], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a text for each rank that was lost by an exception which the drill has not injected.

    keepstep replaces such a rank like any other, so the weights may still be identical. But the exception is an error.

    Args:
        records: the recoveries of the run with failures.
        rows: its faults; see `_row`.
    """
    lost = {
        (failure.rank, failure.since_s): f"step {failure.step}, rank {failure.rank}: {failure.detail}"
        for record in records
        for failure in record.failures
        if failure.cause == Cause.EXCEPTION
    }
    raised = Counter(row["rank"] for row in rows if row["fault"] == "raise")
    own = []
    for (rank, _since_s), text in sorted(lost.items(), key=lambda entry: entry[0][1]):
        if raised[rank]:
            raised[rank] -= 1
        else:
            own.append(text)
    return own


def recovery_from(
    at_s: float, rank: int | None, records: Sequence[RecoveryRecord], but_for: Cause | None = None
) -> RecoveryRecord | None:
    """Returns the recovery that a fault has caused; None if this rank was not lost.

    If the rank was lost more than once, it is the recovery whose loss is nearest to the fault in time. The recovery may
    have begun before the fault, because one recovery can handle several losses.

    Args:
        at_s: time of the fault, in monotonic seconds.
        rank: the rank that it hit.
        records: the recoveries of the run.
        but_for: a cause that the loss cannot have.
    """
    losses = [
        (abs(failure.since_s - at_s), number)
        for number, record in enumerate(records)
        for failure in record.failures
        if failure.rank == rank and failure.cause != but_for and failure.since_s >= at_s - CLOSE_S
    ]
    return records[min(losses)[1]] if losses else None


def _row(fault: DrillFault, at_s: float, rank: int | None, records: list[RecoveryRecord]) -> dict[str, Any]:
    """Returns a fault's row of the result. If a further failure superseded its recovery, the row has the end of the
    later recovery."""
    if fault.kind == "pause":  # it may follow a kill of the same rank, whose recovery is not its own
        records = [record for record in records if any(failure.cause is Cause.HANG for failure in record.failures)]
    # A hang may follow a kill of the same rank more closely than its own loss follows it.
    record = recovery_from(at_s, rank, records, Cause.SIGNAL if fault.kind == "hang" else None)
    row: dict[str, Any] = {
        "fault": fault.kind if fault.seconds is None else f"{fault.kind} {fault.seconds:g} s",
        "specification": str(fault),
        "at_s": at_s,
        "phase": fault.phase or (f"during {fault.during}" if fault.during else None),
        "rank": rank,
        "resume_step": None,
        "steps_recomputed": None,
        "state_from": None,
        "spare": None,
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
        row["detect_ms"] = max(0.0, round((record.begun_s - at_s) * 1000, 3))
        if ended is not None and ended.resumed_s is not None:
            row["resume_step"], row["steps_recomputed"] = ended.resume_step, ended.steps_recomputed
            row["spare"] = str(warmth) if (warmth := ended.warmth.get(-1 if rank is None else rank)) else None
            row["state_from"] = str(origin) if (origin := ended.origins().get(-1 if rank is None else rank)) else None
            row["gap_ms"] = round((ended.resumed_s - at_s) * 1000, 3)
            row["first_step_ms"] = round((ended.first_step_s or 0.0) * 1000, 3)
    return row
