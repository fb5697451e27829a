"""All ranks go to the resume step: they connect their groups, and ranks without a valid copy receive the state."""

from __future__ import annotations

from collections.abc import Collection

from keepstep.protocol.messages import Cause, Recover, StateRecovered
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.decision import Report, decide, kept_step, last_word
from keepstep.protocol.recovery.stages.stage import RecoveryStage
from keepstep.protocol.recovery.suspicion import Left, Silence, left_in_recovery
from keepstep.protocol.recovery.transitions import Next, Stage, ToTraining


class Recovering(RecoveryStage):
    """Lasts until every rank is at the resume step."""

    stage = Stage.RECOVERING
    answer = StateRecovered
    needs_rendezvous = True

    def __init__(self, job: JobState, step: int, now_s: float) -> None:
        super().__init__(job, job.roster.holder_numbers(), now_s + job.deadlines.recover_s)
        before = job.membership
        assert before is not None
        change = job.roster.change_since(before)
        job.membership = before.changed(change)
        decision = decide(job.roster, job.snapshots, job.membership, step, job.generation)
        kept = kept_step(job.roster, job.snapshots, job.membership, job.generation, step)
        record = job.record
        record.resume_step = step
        record.decided_s = now_s
        safe = {id(worker.safe): worker.safe for worker in job.roster.holders()}  # few objects for many ranks
        record.stopped_at_step = max((each.step for each in safe.values() if each), default=None)
        record.actions |= decision.actions
        job.progress.resumes(step, job.generation)
        job.snapshots.resumed(step)
        reason = f"resume at step {step}, where every shard can be"
        for transfer, copy in decision.copies:
            record.got_copy.update(transfer.receivers)
            job.pass_snapshots(job.roster.holder(transfer.sources[0]), copy.rank, [copy])
        copies = tuple(transfer for transfer, _ in decision.copies)
        told = job.tell(before, change)
        job.orders.to_all(Recover(job.generation, step, decision.transfers, told, copies, kept), reason)

    @property
    def busy(self) -> Collection[int]:
        """None for sure: ranks connect to each other and send each other state, so each may wait for a silent one."""
        return ()

    def proceed(self, now_s: float) -> Next:
        """Goes to training when all ranks are at the resume step."""
        job = self.job
        if job.record.reset_s is None and len(job.connected) >= job.settings.world_size:
            job.record.reset_s = now_s
        if self.awaited:
            return None
        job.record.restored_s = now_s
        return ToTraining()

    def state_moves(self, now_s: float) -> None:
        """Gives the ranks as long again as they had in the beginning: a large state, a slow network or storage."""
        self.deadline_s = now_s + self.job.deadlines.recover_s

    def left_without(self, silence: Silence) -> Left | None:
        """Applies the resume rule to the copies as they are now."""
        words = {each.worker: self._word_now(each) for each in self.job.roster.holders()}
        return left_in_recovery(self.job, silence, words)

    def _word_now(self, worker: Worker) -> Report | None:
        """Returns what a rank would report now. One that has answered is at the resume step, and has kept its earlier
        snapshots."""
        word, step = last_word(worker, self.job.generation), self.job.progress.resume_at
        if worker.worker in self.awaited:
            return word
        return (step,), step, tuple(each for each in (word[2] if word else ()) if each <= step)

    def overdue(self, now_s: float) -> Next:
        """Stops all ranks. Ranks that wait for a hanging one are late as well, but the hanging one does not stop."""
        late = self.job.roster.ranks_of(self.awaited)
        return self.interrupted(Cause.HANG, f"ranks {late} did not recover in time", (), now_s)
