"""A loop over epochs with a loop over steps in it, and code of the script at the end of each epoch.

That code is protected like a step. It has its own number among the steps, and the next epoch begins when all ranks have
finished it: if one is lost before, all ranks repeat the end of that epoch.

Code at the *beginning* of an epoch, such as ``model.train()``, runs once on a surviving rank, even if the epoch's first
step is repeated. So its changes to the protected state are part of the state in which that step begins, once for the
job: a replacement that enters the epoch later runs it as well, and gets its changes from the others. It has a number of
its own, too, in front of those of the steps.

If a shard has no replica, a loss takes the job back to a snapshot. A rank can go back to any step of the present epoch:
within the loop over steps, or, from the end of the epoch, by getting the same epoch once more. It cannot go back to the
epoch before, whose end it has left. So at the two numbers that are no steps all ranks have the snapshot of the next
number before they leave (`SnapshotSchedule.ahead`). When an epoch begins, all have the snapshot of its beginning, and
in its first step one with what the code at the beginning has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keepstep.errors import NothingToRecoverFrom, StepInterrupted, UsageError
from keepstep.worker.loop.reading import Reading
from keepstep.worker.loop.step import Step
from keepstep.worker.step_controller import StepController


class Epochs:
    """The iterable that `Session.epochs` returns. Iterate it once."""

    def __init__(self, reading: Reading, start: Callable[[], StepController], present: Callable[[Step], None]) -> None:
        """Args:
        reading: reads the batches.
        start: begins the training. Called when the script requests the first epoch.
        present: called with each step that is yielded.
        """
        self._reading = reading
        self._start, self._present = start, present
        self._controller: StepController | None = None
        self._index: int | None = None
        """Number of the last step or end of an epoch that was yielded; None after the last epoch."""
        self.own: Any = None
        """The `State` that ``start`` creates. Its ``begun`` is the last epoch whose beginning is committed."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each epoch. With ``accumulate`` the last one may have fewer batches."""
        return self._reading.steps_per_epoch

    @property
    def numbers_per_epoch(self) -> int:
        """Numbers of each epoch: those of its steps, one before them and one after them."""
        return self.steps_per_epoch + 2

    def is_step(self, number: int) -> bool:
        """Whether a number is that of a step, and not that of the beginning or end of an epoch."""
        return 0 < number % self.numbers_per_epoch <= self.steps_per_epoch

    def __len__(self) -> int:
        """Epochs of the whole training."""
        return self._reading.epochs

    def __iter__(self) -> Iterator[Epoch]:
        self._controller = self._start()
        try:
            self._next()
            while self._index is not None:
                epoch = self._place()[0]
                self._controller.guard()
                self._controller.seed_before_step(f"epoch {epoch}")
                yield Epoch(self, epoch)
                self._end()
        finally:
            self._reading.close()

    def _place(self) -> tuple[int, int]:
        """The current epoch, and the position in it: 0 before its steps, 1 in the first of them."""
        assert self._index is not None
        return divmod(self._index, self.numbers_per_epoch)

    def _next(self) -> None:
        controller = self._controller
        assert controller is not None
        self._index = controller.next_step(len(self) * self.numbers_per_epoch)

    def _commit(self, calls: Sequence[Callable[[], object]]) -> None:
        """Commits the script's code at the beginning or end of an epoch, when all ranks have finished it.

        Args:
            calls: those that the code has deferred.
        """
        controller = self._controller
        assert controller is not None
        controller.begin()
        try:
            controller.commit_boundary(calls)
        except StepInterrupted:
            controller.undo()
        self._next()

    def _end(self) -> None:
        """The script has finished the code at the end of an epoch."""
        epoch, position = self._place()
        if position <= self.steps_per_epoch:
            raise UsageError(
                f"epoch {epoch} was left before step {max(0, position - 1)} of {self.steps_per_epoch}: iterate it to "
                "its end, 'for step, batch in epoch', or call epoch.run()"
            )
        assert self._controller is not None
        self._commit(self._controller.take_deferred())

    def _begin(self, epoch: int) -> None:
        """The script has finished the code at the beginning of an epoch and requests the steps."""
        controller = self._controller
        assert controller is not None
        counts = self.own.begun == epoch
        if not counts:
            self.own.begun = epoch
        calls = controller.take_deferred()  # its code is not repeated on this rank
        controller.settle(is_done=counts, is_own_done=counts and self._place()[1] > 0)
        while self._place() == (epoch, 0):
            self._commit(calls)

    def steps_of(self, epoch: int) -> Iterator[tuple[Step, Any]]:
        """The remaining steps of an epoch, each with its batch.

        Raises:
            NothingToRecoverFrom: the job has gone back to an earlier epoch.
        """
        controller, num_steps = self._controller, self.steps_per_epoch
        assert controller is not None
        self._begin(epoch)
        while True:
            present, position = self._place()
            if present != epoch or position == 0:
                raise NothingToRecoverFrom(
                    f"the job goes back from epoch {epoch} to number {position} of epoch {present}, where a script "
                    "with a loop over steps in a loop over epochs cannot follow; session.batches() has one loop, which "
                    "can"
                )
            if position > num_steps:
                controller.guard()
                controller.seed()  # for the script's code at the end of the epoch
                return
            assert self._index is not None
            position, updates = position - 1, self._reading.updates
            step = Step(controller, self._index, controller.attempt, controller.resumed, position // updates)
            step.place(epoch, position, num_steps, updates)
            self._present(step)
            controller.seed_before_step()
            try:
                batch = self._reading.read(epoch, position)
            except Exception as error:  # of the script's data set
                if not step.is_cut_off(error):
                    raise
            else:
                yield step, batch
            self._next()


class Epoch(int):
    """One epoch: an int, its number from 0, that yields its remaining steps.

    Iterate it once, as ``for step, batch in epoch``, or call `run`.
    """

    _epochs: Epochs

    def __new__(cls, epochs: Epochs, number: int) -> Epoch:
        epoch = super().__new__(cls, number)
        epoch._epochs = epochs
        return epoch

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # pickled as a plain int

    def __iter__(self) -> Iterator[tuple[Step, Any]]:
        return self._epochs.steps_of(int(self))

    def run(self, function: Callable[[Step, Any], object]) -> None:
        """Calls a function for each remaining step, and again if the step is interrupted.

        Args:
            function: gets the step and its batch; replaces the body of a ``with step:``.
        """
        for step, batch in self:
            with step:
                function(step, batch)
