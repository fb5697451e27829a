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
"""The shares of the grace period until which the ranks may reach a common step: by themselves, and then after the
machine has stopped them. The rest is for the checkpoint, and for scripts that save when they get SIGTERM."""


class JobDrain:
    """The progress of one job's drain."""

    def __init__(self, roster: Roster, orders: Orders, grace_s: float) -> None:
        self._roster = roster
        self._orders = orders
        self._grace_s = grace_s
        self.reason: str | None = None
        """The reason for the drain; None without a drain."""
        self.may_hold = True
        """Whether the ranks may still reach a common step by themselves."""
        self._begun_s, self._next = 0.0, 0
        self._awaited: set[int] = set()
        """The workers that have not answered the last order yet."""
        self._step: int | None = None
        """The step at which the job ends; None until all ranks have agreed on one."""
        self._is_saved = False

    def begin(self, reason: str, now_s: float) -> None:
        """Begins a drain."""
        self.reason, self._begun_s = reason, now_s

    def due_s(self, share: float) -> float | None:
        """Returns when this share of the grace period is over, on the clock of ``now_s``; None without a drain."""
        return None if self.reason is None else self._begun_s + share * self._grace_s

    def hold(self, generation: int) -> None:
        """Orders all ranks to hold before their next steps."""
        self._awaited, self._next = self._roster.holder_numbers(), 0
        self._orders.to_all(Hold(generation), str(self.reason))

    def end_at(self, step: int, generation: int) -> None:
        """Ends the job at a step. The caller must make sure that no rank is beyond it, and every rank can reach it."""
        self.may_hold = False
        self._agree(step, generation)

    def _agree(self, step: int, generation: int) -> None:
        self._step = step
        self._awaited = self._roster.holder_numbers()
        self._orders.to_all(Drain(generation, step), f"{self.reason}: the job ends at step {step}")

    def interrupted(self) -> None:
        """Drops the agreement on a step, because a new generation begins."""
        self._awaited, self._step = set(), None

    def answered(self, workers: Collection[int], message: Holding | Drained) -> str | None:
        """Records that ranks hold before a step, or have done their part at the last one.

        Args:
            workers: the workers that answer. A message from a bundle does not contain them.
            message: their answer.

        Returns:
            How the job was drained, for the log, once all ranks have done their part; else None.
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
