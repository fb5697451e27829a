"""The steps of a training that reads a torch ``DataLoader`` epoch by epoch, each with its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from keepstep.worker.loop.reading import Reading
from keepstep.worker.loop.step import Step
from keepstep.worker.loop.stream import StreamReading


class Batches:
    """The iterable that `Session.batches` returns. Iterate it once."""

    def __init__(
        self, reading: Reading | StreamReading, steps: Callable[[int], Iterator[Step]], length: int | None = None
    ) -> None:
        """Args:
        reading: reads the batches.
        steps: returns an iterator over the given number of steps.
        length: number of steps of the whole training; by default the steps of all epochs.
        """
        self._reading = reading
        self._steps = steps
        self._length = reading.epochs * reading.steps_per_epoch if length is None else length

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each epoch. With ``accumulate`` the last one may have fewer batches."""
        return self._reading.steps_per_epoch

    def __len__(self) -> int:
        """Steps of the whole training."""
        return self._length

    def __iter__(self) -> Iterator[tuple[Step, Any]]:
        try:
            for step in self._steps(len(self)):
                epoch, position = divmod(step.index, self.steps_per_epoch)
                step.place(epoch, position, self.steps_per_epoch, self._reading.updates)
                try:
                    batch = self._reading.read(epoch, position)
                except Exception as error:  # of the script's data set
                    if not step.is_cut_off(error):
                        raise
                    continue
                yield step, batch
        finally:
            self._reading.close()
