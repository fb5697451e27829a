"""`Step`: one step of a training loop."""

from __future__ import annotations

from types import TracebackType

from keepstep.errors import StepInterrupted
from keepstep.worker.step_controller import StepController


class Step(int):
    """One attempt at one optimizer step. Use it once, as ``with step:``.

    It is an int: what a plain loop would count there. In `Session.epochs` that is the number of its batch in the epoch,
    as in ``for i, batch in enumerate(loader)``, else `index`.

    Attributes:
        index: the number of the step, from 0; parameters *at step i* are those that step i's forward reads.
        attempt: how many times this rank has begun this step before.
        resumed: True for the first step after a recovery or a checkpoint: iterators must be recreated.
        committed: after the ``with``: whether the step is committed. An interrupted attempt is undone and repeated.
        epoch: its epoch, from 0; None without a loader (`Session.batches`, `Session.epochs`).
        position: its number among the steps of its epoch, from 0; None likewise.
        is_epoch_end: whether it is the last step of its epoch.
        update: which of the steps that get the same batch it is, from 0 (``updates``).
    """

    index: int
    attempt: int
    resumed: bool
    committed: bool
    epoch: int | None
    position: int | None
    is_epoch_end: bool
    update: int
    _controller: StepController

    def __new__(
        cls, controller: StepController, index: int, attempt: int, resumed: bool, number: int | None = None
    ) -> Step:
        """Args:
        controller: of this process's steps.
        index: see above.
        attempt: see above.
        resumed: see above.
        number: the value as an int; None: ``index``.
        """
        step = super().__new__(cls, index if number is None else number)
        step._controller = controller
        step.index, step.attempt, step.resumed, step.committed = index, attempt, resumed, False
        step.epoch, step.position, step.is_epoch_end, step.update = None, None, False, 0
        return step

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # pickled as a plain int

    __str__ = int.__repr__

    def place(self, epoch: int, position: int, steps_per_epoch: int, updates: int = 1) -> None:
        """Sets `epoch`, `position`, `is_epoch_end` and `update`."""
        self.epoch, self.position, self.update = epoch, position, position % updates
        self.is_epoch_end = position == steps_per_epoch - 1

    def numbered(self, number: int) -> Step:
        """The same step with another value as an int, for a function that is called with each of its batches."""
        step = int.__new__(Step, number)
        vars(step).update(vars(self))
        return step

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
