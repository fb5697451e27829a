"""The drain of a job: all ranks come to one step, rank 0 saves a checkpoint there, and every script gets SIGTERM.

Nothing is broken off as long as there is time: the ranks hold before their next steps and say which these are, and
then go on to the greatest of them. At most one more step is trained, since the gradient barrier keeps ranks within one
step of each other. Where that takes too long the ranks are stopped as after a failure, and the resume rule chooses the
step. A failure in between is recovered from, and then the job ends where all ranks stand. A job that has completed its
last step ends by itself if it can: what its scripts save at their end is worth more than the signal.
"""

from __future__ import annotations

from keepstep.protocol.messages import Drain, Drained, EndJob, Hold, Holding, Terminate
from keepstep.protocol.recovery.end.ending import Ending
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Roster
from keepstep.protocol.recovery.stages import EXIT_DRAINED, Course, Stage

HOLDING, AGREEING = 0.25, 0.5
"""The parts of the grace in which the ranks may come to one step by themselves, and then after having been stopped. The
rest is for the checkpoint, and for scripts that save by themselves when they get the signal."""


class Draining:
    """The end of a job that was asked for from outside."""

    def __init__(self, course: Course, roster: Roster, orders: Orders, ending: Ending, grace_s: float) -> None:
        self._course = course
        self._roster = roster
        self._orders = orders
        self._ending = ending
        self._grace_s = grace_s
        self.reason: str | None = None
        """Why the job is to end; None while it is not."""
        self._begun_s, self._next = 0.0, 0
        self._may_hold = True
        """Whether the ranks may still come to one step by themselves."""
        self._awaited: set[int] = set()
        """The workers whose answer to the last order is missing."""
        self._step: int | None = None
        """The step at which the job ends, as soon as that is known."""
        self._is_saved = False
        self._how = ""

    def begin(self, reason: str, now_s: float, *, has_trained: bool) -> None:
        """The job is to end. Asked once more it changes nothing."""
        if self.reason is not None or self._course.stage is Stage.ENDED:
            return
        self.reason, self._begun_s = reason, now_s
        match self._course.stage:
            case Stage.TRAINING:
                self._awaited, self._next = self._roster.holder_numbers(), 0
                self._orders.to_all(Hold(self._course.generation), reason)
            case Stage.STARTING if has_trained:
                self.terminate("all ranks were starting anew from the newest checkpoint")
            case Stage.STARTING | Stage.STOPPING | Stage.RECOVERING if not has_trained:
                self.terminate("training had not begun")
            case _:
                pass

    def interrupted(self) -> None:
        """A new generation begins: what was agreed in the former one counts no more."""
        self._awaited, self._step = set(), None

    def answered(self, message: Holding | Drained) -> None:
        """Ranks hold before a step, or stand at the last one and have done their part."""
        if self.reason is None:
            return
        self._awaited.difference_update(message.workers)
        match message:
            case Holding():
                self._next = max(self._next, message.step)
                if not self._awaited and self._step is None:
                    self._end_at(self._next)
            case Drained():
                self._is_saved = self._is_saved or message.is_saved
                if not self._awaited and self._course.stage is Stage.TRAINING:
                    how = "with" if self._is_saved else "without"
                    self.terminate(f"drained at step {self._step}, {how} a checkpoint")

    def _end_at(self, step: int) -> None:
        """The job ends at this step, which no rank has gone beyond, and every one can come to."""
        self._step = step
        self._awaited = self._roster.holder_numbers()
        self._orders.to_all(Drain(self._course.generation, step), f"{self.reason}: the job ends at step {step}")

    def stands(self, step: int) -> bool:
        """All ranks stand at a step after a recovery. Says whether the job ends there."""
        if self.reason is not None:
            self._may_hold = False
            self._end_at(step)
        return self.reason is not None

    def terminate(self, how: str) -> None:
        """Every script gets SIGTERM, wherever it is."""
        self._course.enter(Stage.DRAINING, set(), None)
        self._how = how
        self._orders.to_all(Terminate(str(self.reason)), f"{self.reason}: {how}")

    def proceed(self) -> None:
        """Ends the job when no script runs any more."""
        if not self._roster.num_holders:
            self._end()

    @property
    def due_s(self) -> float | None:
        """When `overdue` is to be called, on the clock of ``now_s``; None while there is no drain."""
        if self.reason is None or self._course.stage is Stage.ENDED:
            return None
        match self._course.stage:
            case Stage.TRAINING if self._may_hold:
                part = HOLDING
            case Stage.STOPPING | Stage.RECOVERING | Stage.FINISHED:
                part = AGREEING
            case _:
                part = 1.0
        return self._begun_s + part * self._grace_s

    def overdue(self) -> bool:
        """Its time is over. Says whether the ranks have to be stopped."""
        match self._course.stage:
            case Stage.TRAINING if self._may_hold:
                self._may_hold = False
                return True
            case Stage.STOPPING | Stage.RECOVERING:
                late = self._roster.ranks_of(self._course.awaited)
                self.terminate(f"ranks {late} did not come to one step with the others in half of the grace period")
            case Stage.FINISHED:
                self.terminate("all ranks had completed the last step, and their scripts did not end")
            case _:
                self._how = f"{self._how}; " if self._how else ""
                self._how += "what still ran was killed after the grace period"
                self._end()
        return False

    def _end(self) -> None:
        self._ending.end(EndJob(EXIT_DRAINED, f"{self.reason}: {self._how}"))
