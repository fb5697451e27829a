"""The drain of a job: all ranks complete the same step, save a checkpoint there, and every script gets SIGTERM.

As long as there is time, the machine interrupts nothing: the ranks hold before their next steps and report these, and
then continue to the greatest of them. They train at most one more step, because the gradient barrier keeps ranks within
one step of each other. If that takes too long, the machine stops the ranks as after a failure, and the resume rule
chooses the step. If a failure happens meanwhile, the machine recovers, and the job ends at the resume step. A job that
has completed its last step gets time to end by itself: what its scripts save at their end matters more than the signal.

Each stage defines what a drain means for it (`keepstep.protocol.recovery.stages`).
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.protocol.messages import Drain, Drained, Hold, Holding
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Roster

HOLDING, AGREEING = 0.25, 0.5
"""The parts of the grace period in which the ranks may come to one step by themselves, and then after the machine has
stopped them. The rest is for the checkpoint, and for scripts that save by themselves when they get the signal."""


class JobDrain:
    """How far the drain of one job has come, from the request on."""

    def __init__(self, roster: Roster, orders: Orders, grace_s: float) -> None:
        self._roster = roster
        self._orders = orders
        self._grace_s = grace_s
        self.reason: str | None = None
        """The reason of the drain; None without a drain."""
        self.may_hold = True
        """Whether the ranks may still come to one step by themselves."""
        self._begun_s, self._next = 0.0, 0
        self._awaited: set[int] = set()
        """The workers whose answer to the last order is missing."""
        self._step: int | None = None
        """The step at which the job ends; None until all ranks have agreed on one."""
        self._is_saved = False

    def begin(self, reason: str, now_s: float) -> None:
        """A drain was requested, for this reason."""
        self.reason, self._begun_s = reason, now_s

    def due_s(self, share: float) -> float | None:
        """When so much of the grace period is over, on the clock of ``now_s``; None without a drain."""
        return None if self.reason is None else self._begun_s + share * self._grace_s

    def hold(self, generation: int) -> None:
        """Has all ranks hold before their next steps."""
        self._awaited, self._next = self._roster.holder_numbers(), 0
        self._orders.to_all(Hold(generation), str(self.reason))

    def end_at(self, step: int, generation: int) -> None:
        """Has the job end at this step. No rank has gone beyond it, and every rank can come to it."""
        self.may_hold = False
        self._agree(step, generation)

    def _agree(self, step: int, generation: int) -> None:
        self._step = step
        self._awaited = self._roster.holder_numbers()
        self._orders.to_all(Drain(generation, step), f"{self.reason}: the job ends at step {step}")

    def interrupted(self) -> None:
        """A new generation begins: an agreement of the former one counts no more."""
        self._awaited, self._step = set(), None

    def answered(self, workers: Collection[int], message: Holding | Drained) -> str | None:
        """Ranks hold before a step, or stand at the last one and have done their part.

        Args:
            workers: those that answer; a message that came in a bundle does not name them.
            message: what they say.

        Returns:
            Where the job was drained, once all ranks have done their part.
        """
        if self.reason is None:
            return None
        self._awaited.difference_update(workers)
        match message:
            case Holding():
                self._next = max(self._next, message.step)
                if not self._awaited and self._step is None:
                    self._agree(self._next, message.generation)
            case Drained():
                self._is_saved = self._is_saved or message.is_saved
                if not self._awaited:
                    return f"drained at step {self._step}, {'with' if self._is_saved else 'without'} a checkpoint"
        return None
