"""The last stages of a job: from its last step, or from the point where it cannot continue, to its end."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.protocol.messages import Abandon, Complete, EndJob, Rescue, Terminate
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.end.drain import AGREEING
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure
from keepstep.protocol.recovery.stages.decision import is_in_doubt
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.suspicion import Left, Silence
from keepstep.protocol.recovery.transitions import Next, Stage, ToDraining, ToEnded


class Finished(JobStage):
    """All ranks have completed the last step. The code after it may run without a time limit."""

    stage = Stage.FINISHED
    reports_standstill = True

    def __init__(self, job: JobState) -> None:
        super().__init__(job)
        job.orders.to_all(Complete(job.generation), "all ranks completed the last step")
        job.processes.fence_spares("the last step is complete: the spare is not needed any more")

    def proceed(self, now_s: float) -> Next:
        """Ends the job when the last script has ended."""
        return self.script_ended(now_s)

    def ranks_lost(self, failures: Sequence[Failure], now_s: float) -> Next:
        """Breaks the collectives of the other ranks, which may wait forever: no spare replaces a rank in this stage."""
        first = failures[0]
        reason = f"rank {first.rank} failed in the code after the last step: {first.detail}"
        self.failure = self.failure or reason
        self.job.orders.to_all(Abandon(first.detail), reason)
        self.deadline_s = now_s + self.job.deadlines.end_s
        return None

    def overdue(self, now_s: float) -> Next:
        """Ends the job, because a rank was lost and the other scripts have not ended in time."""
        return ToEnded(verdicts.scripts_overdue(self.failure))

    def left_without(self, silence: Silence) -> Left | None:
        """Keeps a silent node: its scripts may still save what the job was for."""
        return Left.NOTHING

    @property
    def drain_share(self) -> float:
        """A part of the grace period. The rest is for scripts that handle SIGTERM."""
        return AGREEING

    def drain_overdue(self, now_s: float) -> Next:
        """Sends SIGTERM to the scripts that still run."""
        return ToDraining("all ranks had completed the last step, and their scripts did not end")


class Rescuing(JobStage):
    """The job cannot continue: each rank that holds state saves it."""

    stage = Stage.RESCUING

    def __init__(self, job: JobState, reason: str, now_s: float) -> None:
        super().__init__(job, job.roster.holder_numbers(), now_s + job.deadlines.end_s)
        self.failure = reason
        in_doubt = is_in_doubt(job.roster, job.membership, job.generation)
        job.orders.to_all(Rescue(reason, in_doubt), reason)

    def state_moves(self, now_s: float) -> None:
        """Gives the ranks as long again as they had in the beginning."""
        self.deadline_s = now_s + self.job.deadlines.end_s

    def proceed(self, now_s: float) -> Next:
        """Ends the job when no rank is left that could save its state."""
        return None if self.awaited else self.overdue(now_s)

    def overdue(self, now_s: float) -> Next:
        """Ends the job with the state that is saved by now."""
        return ToEnded(verdicts.rescued(self.job.roster, self.failure))


class Draining(JobStage):
    """Every script gets SIGTERM, wherever it is."""

    stage = Stage.DRAINING
    blames_places = False

    def __init__(self, job: JobState, how: str) -> None:
        super().__init__(job)
        self._how = how
        job.orders.to_all(Terminate(str(job.drain.reason)), f"{job.drain.reason}: {how}")

    def proceed(self, now_s: float) -> Next:
        """Ends the job when the last script has ended."""
        return None if self.job.roster.num_holders else self._end(self._how)

    def worker_joined(self, worker: Worker, now_s: float) -> None:
        """Starts no spares, because the job ends soon."""
        self.job.progress.is_initialised = True

    def script_ended(self, now_s: float) -> Next:
        """Does nothing, because SIGTERM asked the script to end."""
        return None

    def drain_overdue(self, now_s: float) -> Next:
        """Ends the job, because the grace period is over."""
        return self._end(f"{self._how}; {verdicts.KILLED_AFTER_GRACE}")

    def _end(self, how: str) -> Next:
        return ToEnded(verdicts.drained(self.job.drain.reason, how))


class JobEnded(JobStage):
    """The job is over."""

    stage = Stage.ENDED

    def __init__(self, job: JobState, order: EndJob) -> None:
        super().__init__(job)
        job.orders.to_all(order, order.reason)
