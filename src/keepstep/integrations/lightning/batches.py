"""Random access to the batches of Lightning's training loaders, by epoch and number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader

from keepstep.errors import ConfigurationError
from keepstep.worker.loop.reading import Reading


class NumberedLoader:
    """Wraps a training loader of the user's, and forwards attribute access to it.

    Attributes:
        reading: reads the loader's batches.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rank: Callable[[], int]) -> None:
        """Args:
            loader: the loader, with the sampler that Lightning has set.
            seed: seed of the loader's random numbers.
            rank: returns the rank whose samples this process reads.

        Raises:
            ConfigurationError: the order of the loader's batches is not reproducible.
        """
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"KeepstepStrategy: {type(loader).__name__} is not a torch DataLoader, so no batch of it can be found "
                "again: let train_dataloader() return a DataLoader"
            )
        self._loader = loader
        self.reading = Reading(loader, sys.maxsize, 1, seed, rank)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.reading.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of the first epoch. The training itself reads batches by number."""
        return (self.reading.read(0, number) for number in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


class TrainingBatches:
    """The batches of an epoch as Lightning combines them of one or several loaders."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined

    def read(self, epoch: int, number: int) -> Any:
        """Returns one batch, or the combined batches of several loaders.

        Args:
            epoch: from 0.
            number: in the epoch, from 0.
        """
        combined = self._combined
        limits = combined.limits or [sys.maxsize] * len(combined.flattened)
        lengths = [int(min(len(each), limit)) for each, limit in zip(combined.flattened, limits, strict=True)]
        batches: list[Any] = []
        for loader, length in zip(combined.flattened, lengths, strict=True):
            cycle, position = divmod(number, length)
            if cycle and combined._mode == "max_size":
                batches.append(None)
            else:  # the shorter ones of "max_size_cycle" are read several times in each epoch
                num_cycles = -(-max(lengths) // length)
                batches.append(loader.reading.read(epoch * num_cycles + cycle, position))
        return tree_unflatten(batches, combined._spec)

    def close(self) -> None:
        """Ends the loaders' workers."""
        for loader in self._combined.flattened:
            loader.reading.close()
