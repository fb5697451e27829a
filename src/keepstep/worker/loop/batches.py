"""The steps of a training that reads a torch ``DataLoader`` epoch by epoch, each with its batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from keepstep.data.loaderorder import LoaderOrder, reader_of, samplers_of
from keepstep.data.numbers import whole
from keepstep.errors import ConfigurationError
from keepstep.worker.loop.step import Step


class Batches:
    """What `Session.batches` gives. Iterate it once."""

    def __init__(
        self,
        loader: DataLoader[Any],
        epochs: int,
        accumulate: int,
        seed: int,
        steps: Callable[[int], Iterator[Step]],
        rank: Callable[[], int],
    ) -> None:
        """Args:
        loader: see `Session.batches`.
        epochs: see there.
        accumulate: see there.
        seed: of the session.
        steps: hands out so many steps.
        rank: whose samples this process reads; asked when the first batch is read.

        Raises:
            ConfigurationError: the loader's order cannot be found again, or a number is below 1.
        """
        self._accumulate = whole("accumulate", accumulate, 1)
        self._order = LoaderOrder(loader, epochs, seed)
        self._reader = reader_of(loader, seed)
        self._steps, self._rank = steps, rank

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each epoch. With ``accumulate`` the last one may have fewer batches."""
        return -(-self._order.num_batches // self._accumulate)

    def __len__(self) -> int:
        """Steps of the whole training."""
        return self._order.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Step, Any]]:
        try:
            for step in self._steps(len(self)):
                step.epoch, position = divmod(step.index, self.steps_per_epoch)
                step.is_epoch_end = position == self.steps_per_epoch - 1
                yield step, self._read(step.index)
        finally:
            self._reader.close()

    def _read(self, index: int) -> Any:
        """The batch of a step, or its list of batches. A step that comes again reads again: the script may have changed
        the former objects in ways that cannot be seen, such as ``batch.pop("labels")`` or ``x.data.mul_(2)``."""
        epoch, position = divmod(index, self.steps_per_epoch)
        first = position * self._accumulate
        last = min(first + self._accumulate, self._order.num_batches)
        begin, rank = epoch * self._order.num_batches, self._rank()
        found = [
            self._reader.read(number, rank, functools.partial(self._order.requests, number, rank))
            for number in range(begin + first, begin + last)
        ]
        return found[0] if self._accumulate == 1 else found


def check_replicas(loader: DataLoader[Any], data_world_size: int, world_size: int) -> None:
    """Refuses a ``DistributedSampler`` that gives samples of their own to ranks that must read the same ones.

    Raises:
        ConfigurationError: it shares them out among all ranks, as it does by default, and not all differ in their data.
    """
    replicas = (part.num_replicas for part in samplers_of(loader) if isinstance(part, DistributedSampler))
    if data_world_size < world_size and world_size in replicas:
        raise ConfigurationError(
            f"session.batches(): the DistributedSampler shares out the samples among all {world_size} ranks, and only "
            f"{data_world_size} have samples of their own: give it num_replicas=session.data_world_size and "
            "rank=session.data_rank"
        )
