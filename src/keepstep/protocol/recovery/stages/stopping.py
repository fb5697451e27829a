"""After a failure: survivors stop, agents kill lost processes, and each missing rank gets a new process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from keepstep.protocol.messages import Cause, DoubtLifted, SafePointReached, Stop, WorkerSuspected
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure, Warmth
from keepstep.protocol.recovery.stages.decision import (
    begins_again,
    equal_in_doubt,
    is_in_doubt,
    last_word,
    out_of_reach,
    reachable_step,
    tied_ranks,
    without_copy,
)
from keepstep.protocol.recovery.stages.stage import RecoveryStage
from keepstep.protocol.recovery.suspicion import Left, Silence, left_in_recovery
from keepstep.protocol.recovery.transitions import (
    Next,
    Stage,
    ToEnded,
    ToRecovering,
    ToRescuing,
    ToStarting,
    ToStopping,
)
from keepstep.protocol.wording import by_reason, who

_SYNCED = (Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED)
"""Phases of a rank that has complete gradients of its step."""
_TIMES_LOADED = 2
"""So many generations in a row end because a rank refuses the state: a mismatch may come from what the transfer met,
but not twice."""


class Stopping(RecoveryStage):
    """Lasts until all survivors are at safe points, all lost processes are gone, and each rank has a worker."""

    stage = Stage.STOPPING
    answer = SafePointReached

    def __init__(self, job: JobState, failure: ToStopping, now_s: float) -> None:
        job.begin_generation(failure.cause, failure.detail, now_s)
        self._fenced_by_s = now_s
        """Deadline for the fence of the lost processes."""
        super().__init__(job, job.roster.holder_numbers(), now_s + job.deadlines.stop_s)
        self._waits_for_help = False
        """Whether the stage waits for a process to start or a node to join."""
        self._announced = ""
        """The published sentence that says for what it waits."""
        steps = (each.step for each in failure.failures if each.step is not None and each.phase in _SYNCED)
        synced_step = max(steps, default=None)
        job.orders.to_all(Stop(job.generation, failure.detail, synced_step), failure.detail)
        self.interrupted(failure.cause, failure.detail, failure.failures, now_s)

    def interrupted(self, cause: str, detail: str, failures: Sequence[Failure], now_s: float) -> Next:
        """Adds the failures to the current recovery, instead of beginning another one."""
        job = self.job
        if job.record not in job.records[-1:] and (failures or cause != Cause.DRAIN):
            job.records.append(job.record)
        if failures:
            job.record.add_failures(failures)
            self._fenced_by_s = now_s + job.deadlines.end_s
            if not self.awaited or self.deadline_s is None:  # give no more time to survivors that do not answer
                self.deadline_s = max(self.deadline_s or 0.0, self._fenced_by_s)
        return None

    def spare_lost(self, detail: str, now_s: float) -> Next:
        """Starts another spare, because the lost one may have been for a missing rank."""
        job = self.job
        job.processes.top_up_spares(f"a spare was lost: {detail}")
        if job.processes.keep_failing:
            return ToRescuing(f"fresh processes are lost one after the other: {detail}")
        return None

    def overdue(self, now_s: float) -> Next:
        """Suspects survivors that do not answer in time, or saves the state if the stage cannot complete."""
        roster = self.job.roster
        if self.awaited:
            for number in sorted(self.awaited):
                detail = "it did not reach a safe point in time"
                suspected = WorkerSuspected(number, Cause.HANG, detail, None, now_s, ())
                self.job.suspicions.add(suspected, now_s, is_due=True)
            return None
        if roster.unfenced() and now_s < self._fenced_by_s:
            self.deadline_s = self._fenced_by_s
            return None
        if roster.unfenced():
            self.job.processes.give_up_unfenced()
            return None
        return ToRescuing("no replacement reached its first step in time")

    # ---- all ranks have stopped -------------------------------------------------------------------------------------

    def left_without(self, silence: Silence) -> Left | None:
        """Applies the resume rule when all ranks that are not silent have stopped."""
        if not self.awaited <= set(silence.silent):
            return None
        roster, generation = self.job.roster, self.job.generation
        words = {each.worker: last_word(each, generation) for each in roster.holders()}
        equal = equal_in_doubt(roster, self.job.membership, generation, silence.silent)
        return left_in_recovery(self.job, silence, {**words, **equal})

    def proceed(self, now_s: float) -> Next:
        """Chooses the resume step when all ranks have stopped, and goes to it once each rank has a worker."""
        job = self.job
        record = job.record
        if job.gives_up is not None and self.awaited <= job.suspicions.workers:
            return ToRescuing(job.gives_up)
        if self.awaited or job.roster.unfenced():
            if not self.awaited and self.deadline_s is None:
                self.deadline_s = max(self._fenced_by_s, now_s)
            return None
        record.stopped_s = record.stopped_s or now_s
        self._lift_doubts()
        if (idle := job.generation - job.progress.last_generation) > job.settings.max_recoveries_without_progress:
            return ToRescuing(f"{idle} failures in a row without a completed step: {record.detail}")
        refused = {each.generation for each in job.records if each.cause == Cause.STATE}
        if refused.issuperset(range(record.generation - _TIMES_LOADED + 1, record.generation + 1)):
            return ToRescuing(f"the state was loaded {_TIMES_LOADED} times and is not what was loaded: {record.detail}")
        if record.cause == Cause.APART:
            return ToRescuing(f"replicas have trained apart, and the job has --compare strict: {record.detail}")
        if ended_early := verdicts.ended_early(job.roster):
            return ToEnded(ended_early)
        if record.num_exceptions == job.settings.world_size:
            return ToEnded(verdicts.failed_everywhere(record.detail))
        if (step := reachable_step(job.roster, job.snapshots, job.membership, job.generation)) is None:
            return self._no_step_is_reached(now_s)
        if begins_again(job.progress, job.roster, step, resumes=job.resumes):
            return ToEnded(verdicts.no_checkpoint_found(job.progress.trained_to))
        if self._is_stuck_again(step):
            return ToRescuing(f"all ranks wait in the same step again, with groups connected anew: {record.detail}")
        return self._fill_ranks(step, now_s)

    def _is_stuck_again(self, step: int) -> bool:
        """Whether all ranks have waited in collectives twice, and completed no step in between."""
        progress = self.job.progress
        causes = [each.cause for each in self.job.records if each.generation > progress.last_generation]
        return step <= progress.resume_at and causes[-2:] == [Cause.STUCK, Cause.STUCK]

    def _lift_doubts(self) -> None:
        """Lets copies in doubt count that are equal, where no other copy is left."""
        job = self.job
        equal = equal_in_doubt(job.roster, job.membership, job.generation)
        if not equal:
            return
        workers = [job.roster.workers[number] for number in sorted(equal)]
        for worker in workers:
            assert worker.safe is not None
            reach, current_step, _ = equal[worker.worker]
            worker.safe = msgspec.structs.replace(worker.safe, reach=reach, current_step=current_step, doubt=None)
        ranks = sorted(worker.rank or 0 for worker in workers)
        reason = f"ranks {ranks} have decided the same by a value that was cut off: their copies are equal"
        job.orders.to_all(DoubtLifted(job.generation, tuple(equal)), reason)

    def _fill_ranks(self, step: int, now_s: float) -> Next:
        """Gives every missing rank a warm spare. If there are too few, gives none yet, and starts processes."""
        job = self.job
        assert job.membership is not None
        tied = tied_ranks(job.roster, job.snapshots, job.membership, step, job.generation)
        replacements = job.roster.replacements(tied)
        if replacements is not None:
            job.roster.give_ranks(replacements)
            for rank, worker in replacements.items():
                job.record.replacements[rank] = worker.worker
                job.record.warmth[rank] = self._warmth_of(worker)
                if kept := job.snapshots.on_node(rank, worker.node):
                    worker.inherits = frozenset().union(*(each.steps for each in kept))
                    job.pass_snapshots(worker, rank, kept)
                job.assign(worker, f"spare {worker.worker} takes rank {rank}")
            job.standstill.no_longer(self._announced)
            return ToRecovering(step)
        missing = job.roster.missing_ranks()
        if job.drain.reason is not None:  # there is no time to wait for spares
            return ToRescuing(f"{job.drain.reason}, and no spare is warm for ranks {missing}")
        if not job.processes.start_fresh(missing, tied):
            return ToRescuing(f"--max-restarts is used up: {job.record.detail}")
        if job.processes.none_can_come(len(missing)):
            return ToRescuing(f"no device is left for ranks {missing}: {job.record.detail}")
        self._wait_for_help(now_s)
        self._announce(missing, len(missing) - len(job.roster.spares()), now_s)
        return None

    def _warmth_of(self, worker: Worker) -> Warmth:
        if self._waits_for_help:
            return Warmth.COLD
        return Warmth.WARM if worker.ready is not None else Warmth.HALF_WARM

    def _no_step_is_reached(self, now_s: float) -> Next:
        job = self.job
        if is_in_doubt(job.roster, job.membership, job.generation):
            return ToRescuing(
                "what is left of the state is in doubt, for the script has decided something by a value that a failure "
                f"has cut off, and no replica's copy equals it: {self._copies()}"
            )
        unread = out_of_reach(job.roster, job.snapshots, job.membership, job.generation)
        if job.progress.trained_to > 0 and not (job.writes_checkpoints or job.resumes):
            copies = self._copies() if unread is None else f"{self._copies()}; {unread}"
            return ToEnded(verdicts.nothing_to_recover(job.generation, copies))
        if (drain := job.drain.reason) is not None:
            return ToEnded(verdicts.drained_in_vain(drain, self._copies(), has_checkpoint=job.has_checkpoint))
        reason = f"no live rank reaches a step{'' if unread is None else f', and {unread}'}: all ranks restart"
        job.processes.fence_ranks(reason)
        job.processes.fence_spares("all ranks restart, and it started with the former ones")
        if job.roster.unfenced():
            return None
        if not job.roster.may_start(job.settings.world_size):
            return ToEnded(verdicts.restarts_used_up(job.record.detail))
        if (room := job.processes.room_for_ranks()) < job.settings.world_size:
            if not job.settings.nodes_may_join:
                return ToEnded(verdicts.too_few_devices(job.settings.world_size, job.record.detail))
            self._wait_for_help(now_s)  # another node has to come
            self._announce(range(job.settings.world_size), job.settings.world_size - room, now_s)
            return None
        job.standstill.no_longer(self._announced)
        self._tell_of_restart("from the newest checkpoint" if job.progress.has_trained else "")
        job.record.decided_s = now_s
        return ToStarting(reason)

    def _copies(self) -> str:
        """Returns what has become of the state on each rank."""
        job = self.job
        if job.membership is None:
            return job.record.detail
        return by_reason(without_copy(job.roster, job.snapshots, job.membership, job.records, job.generation))

    def _tell_of_restart(self, how: str) -> None:
        job, record = self.job, self.job.record
        why = "no live rank holds the state" if job.progress.has_trained else "this was before the first step"
        idle, most = job.generation - job.progress.last_generation, job.settings.max_recoveries_without_progress + 1
        text = f"{record.detail}; {why}, so all ranks start again {how}".rstrip()
        text += f" (failure {idle} in a row without a completed step; {most} end the job)"
        if not job.progress.has_trained and any(each.cause == Cause.HANG for each in record.failures):
            text += f". {verdicts.PREPARE_BEFORE}"
        job.notices.append(text)

    def _wait_for_help(self, now_s: float) -> None:
        """Begins the wait for a process to start or a node to join. Later events must not postpone its deadline."""
        if not self._waits_for_help:
            self._waits_for_help, self.deadline_s = True, now_s + self.job.deadlines.start_s

    def _announce(self, ranks: Collection[int], num_devices: int, now_s: float) -> None:
        """Publishes that ranks wait for devices, if some are missing: only the job's operator can supply them."""
        if num_devices <= 0:
            self.job.standstill.no_longer(self._announced)
            return
        assert self.deadline_s is not None, "the wait has begun"
        places = "a free device" if num_devices == 1 else f"{num_devices} free devices"
        situation = (
            f"{self.job.record.detail}: no device is left for {who(ranks)}, and the job waits until nodes with "
            f"{places} join. "
        )
        if not self._announced.startswith(situation):  # the rest counts from the moment when it began
            self._announced = (
                f"{situation}If they do not within {self.deadline_s - now_s:.0f} s, it ends, and what is left of its "
                "state is saved"
            )
        self.job.standstill.announce(self._announced)
