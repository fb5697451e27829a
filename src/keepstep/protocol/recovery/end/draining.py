"""The drain of a job: all ranks come to one step, rank 0 saves a checkpoint there, and every script gets SIGTERM.

It begins like a recovery, so the resume rule chooses the step. It has ``grace_s`` in all, and half of that to bring the
ranks to one step: what they do not agree on by then, the scripts may still save by themselves.
"""

from __future__ import annotations

from keepstep.protocol.messages import Drain, Drained, EndJob, Terminate
from keepstep.protocol.recovery.end.ending import Ending
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Roster
from keepstep.protocol.recovery.stages import EXIT_DRAINED, Course, Stage

AGREEING = 0.5
"""The part of the grace in which the ranks may come to one step. Scripts that save by themselves need the rest."""


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
        self._agree_by_s = self._end_by_s = 0.0
        self._how = ""
        self._is_saved = self._is_told = False

    def begin(self, reason: str, now_s: float, *, has_trained: bool) -> bool:
        """The job is to end. Asked once more it changes nothing.

        Returns:
            whether the ranks train, and have to be stopped first.
        """
        if self.reason is not None or self._course.stage is Stage.ENDED:
            return False
        self.reason = reason
        self._agree_by_s, self._end_by_s = now_s + AGREEING * self._grace_s, now_s + self._grace_s
        match self._course.stage:
            case Stage.FINISHED:
                self.terminate("all ranks had completed the last step")
            case Stage.STARTING if has_trained:
                self.terminate("all ranks were starting anew from the newest checkpoint")
            case Stage.STARTING | Stage.STOPPING | Stage.RECOVERING if not has_trained:
                self.terminate("training had not begun")
            case _:
                pass
        return self._course.stage is Stage.TRAINING

    def stand(self, step: int, *, is_checkpointing: bool) -> None:
        """All ranks stand at a step, which is the job's last one for now."""
        self._course.enter(Stage.DRAINING, self._roster.holder_numbers(), None)
        self._how = f"drained at step {step}"
        if not is_checkpointing:
            self._how += "; keepstep writes no checkpoint without protect(checkpoint_dir=...)"
        self._orders.to_all(Drain(self._course.generation, step), f"{self.reason}: the job ends at step {step}")

    def saved(self, message: Drained) -> None:
        """Ranks have done their part, and rank 0 may have written a checkpoint."""
        if message.is_saved and not self._is_saved:
            self._is_saved = True
            self._how += ", with a checkpoint"

    def terminate(self, how: str = "") -> None:
        """Every script gets SIGTERM, wherever it is."""
        self._course.enter(Stage.DRAINING, set(), None)
        self._how = how or self._how
        self._is_told = True
        self._orders.to_all(Terminate(str(self.reason)), f"{self.reason}: {self._how}")

    def proceed(self) -> None:
        """Goes on when all ranks have done their part, and ends the job when no script runs any more."""
        if not self._is_told and not self._course.awaited:
            self.terminate()
        if self._is_told and not self._roster.num_holders:
            self._end()

    @property
    def due_s(self) -> float | None:
        """When `overdue` is to be called, on the clock of ``now_s``; None while there is no drain."""
        if self.reason is None or self._course.stage is Stage.ENDED:
            return None
        return self._agree_by_s if self._course.stage in (Stage.STOPPING, Stage.RECOVERING) else self._end_by_s

    def overdue(self) -> None:
        """Its time is over."""
        if self._course.stage in (Stage.STOPPING, Stage.RECOVERING):
            late = self._roster.ranks_of(self._course.awaited)
            self.terminate(f"ranks {late} did not come to one step with the others within half of the grace period")
        else:
            self._how += "; what still ran was killed after the grace period"
            self._end()

    def _end(self) -> None:
        self._ending.end(EndJob(EXIT_DRAINED, f"{self.reason}: {self._how}"))
