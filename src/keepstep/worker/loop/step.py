"""`Step`: one step of a training loop."""

from __future__ import annotations

from types import TracebackType

from keepstep.errors import StepInterrupted
from keepstep.worker.step_controller import StepController


class Step:
    """One attempt at one optimizer step. Use it once, as ``with step:``.

    Attributes:
        index: the number of the step, from 0; parameters *at step i* are those that step i's forward reads.
        attempt: how many times this rank has begun this step before.
        resumed: True for the first step after a recovery or a checkpoint: iterators must be recreated.
        committed: after the ``with``: whether the step is committed. An interrupted attempt is undone and repeated.
        epoch: its epoch, from 0; None without a loader (`Session.batches`, `Session.epochs`).
        position: its number among the steps of its epoch, from 0; None likewise.
        is_epoch_end: whether it is the last step of its epoch.
    """

    def __init__(self, controller: StepController, index: int, attempt: int, resumed: bool) -> None:
        self.index = index
        self.attempt = attempt
        self.resumed = resumed
        self.committed = False
        self.epoch: int | None = None
        self.position: int | None = None
        self.is_epoch_end = False
        self._controller = controller

    def place(self, epoch: int, position: int, steps_per_epoch: int) -> None:
        """Sets `epoch`, `position` and `is_epoch_end`."""
        self.epoch, self.position = epoch, position
        self.is_epoch_end = position == steps_per_epoch - 1

    def __enter__(self) -> Step:
        self._controller.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            try:
                self._controller.commit()
                self.committed = True
                return False
            except StepInterrupted:
                pass
        else:
            return self.is_cut_off(error)
        self._controller.undo()
        return True

    def is_cut_off(self, error: BaseException) -> bool:
        """Whether an exception in this step, or in front of it, comes from a failure elsewhere. If so, undoes it."""
        if not self._controller.is_interruption(error):
            return False
        self._controller.undo()
        return True

    def __repr__(self) -> str:
        return f"<Step {self.index}, attempt {self.attempt}, {'committed' if self.committed else 'not committed'}>"
