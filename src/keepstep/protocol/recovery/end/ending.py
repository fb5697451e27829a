"""The last stages of a job: from its last step, or from where it cannot go on, to its end."""

from __future__ import annotations

from keepstep.protocol.messages import Abandon, Complete, EndJob, Rescue
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.recovery.records import Failure
from keepstep.protocol.recovery.stages import EXIT_FAILED, Course, Stage


class Ending:
    """The last stages of a job: from its last step, or from where it cannot go on, to its end."""

    def __init__(
        self, course: Course, roster: Roster, orders: Orders, progress: Progress, end_deadline_s: float
    ) -> None:
        self._course = course
        self._progress = progress
        self._roster = roster
        self._orders = orders
        self._end_deadline_s = end_deadline_s
        self._why: str | None = None
        """Why the job does not end well, as soon as it is known."""

    def is_in_start_up(self, worker: Worker) -> bool:
        """Whether a failing script ends the job: started anew it would fail again, and nothing is lost yet."""
        if worker.rank is None or worker.lost or self._progress.has_trained:
            return False
        return self._course.stage in (Stage.STARTING, Stage.STOPPING, Stage.RECOVERING)

    def exited_in_start_up(self, worker: Worker, detail: str) -> None:
        """A rank ended by itself before the job had ever trained, or in any way where its script is not protected."""
        if self._progress.is_initialised:
            self.end(EndJob(EXIT_FAILED, f"rank {worker.rank} ended before its first step: {detail}"))
        else:
            self.end(EndJob(EXIT_FAILED, f"rank {worker.rank} ended: {detail}; {verdicts.NOT_PROTECTED}"))

    def complete(self) -> None:
        """All ranks have completed the last step: what their scripts do after it may take as long as it likes."""
        self._course.enter(Stage.FINISHED, set(), None)
        self._orders.to_all(Complete(self._course.generation), "all ranks completed the last step")
        for spare in list(self._roster.spares()):
            self._roster.mark_lost(spare, gone=False)
            self._orders.fence(spare, "the last step is complete: it is not needed any more")

    def lost_after_last_step(self, failure: Failure, now_s: float) -> None:
        """No spare takes its place. The others may wait for it in vain, so their collectives are broken."""
        reason = f"rank {failure.rank} failed in the code after the last step: {failure.detail}"
        self._why = self._why or reason
        self._orders.to_all(Abandon(failure.detail), reason)
        self._course.deadline_s = now_s + self._end_deadline_s

    def rescue(self, reason: str, now_s: float) -> None:
        """The job cannot go on: who holds state saves it."""
        self._course.enter(Stage.RESCUING, self._roster.holder_numbers(), now_s + self._end_deadline_s)
        self._why = reason
        self._orders.to_all(Rescue(reason), reason)

    def proceed(self, last_detail: str) -> None:
        """Ends the job when no rank is left that could save its state, or whose script still runs."""
        if self._course.stage is Stage.RESCUING and not self._course.awaited:
            self.end(verdicts.rescued(self._roster, self._why))
        elif self._course.stage is Stage.FINISHED and not self._roster.num_holders:
            self.through(last_detail)

    def through(self, last_detail: str) -> None:
        """No script runs any more, be it before the last step or after it."""
        is_complete = self._course.stage is Stage.FINISHED
        if not self._progress.is_initialised:
            self.end(EndJob(0, f"all scripts have ended; {verdicts.NOT_PROTECTED}"))
            return
        self.end(verdicts.scripts_through(self._roster, self._why, last_detail, is_complete=is_complete))

    def overdue(self) -> None:
        """The deadline of a last stage has come."""
        is_rescuing = self._course.stage is Stage.RESCUING
        self.end(verdicts.rescued(self._roster, self._why) if is_rescuing else verdicts.scripts_overdue(self._why))

    def end(self, order: EndJob) -> None:
        """The job is over."""
        self._course.enter(Stage.ENDED, set(), None)
        self._course.ended = order
        self._orders.to_all(order, order.reason)
