"""The batches of a loader with a position, for a dataset that can only be read sequentially."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from keepstep.data.numbers import whole
from keepstep.data.reader import random_numbers_of
from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.wrapped import prepared
from keepstep.worker.values.attributes import State


class StreamReading:
    """Reads the batches of each step in turn.

    The loader's position is a rank-local value of `Session.state`. A repeated step and a replacement continue there.
    """

    epochs = 1
    """One, because a stream has no epochs: at its end the reading starts again, until the last step."""

    def __init__(
        self, loader: Any, num_steps: int, accumulate: int, own: State, seed: int, rank: Callable[[], int]
    ) -> None:
        """Args:
        loader: see `Session.batches`.
        num_steps: number of steps of the whole training.
        accumulate: batches per step.
        own: the rank-local values; ``position`` holds the loader's state.
        seed: seed of the session.
        rank: returns the rank whose samples this process reads. First called when the first batch is read.

        Raises:
            ConfigurationError: the loader has no ``state_dict()``, or a number is below 1.
        """
        self.steps_per_epoch = whole("steps", num_steps, 1)
        self._accumulate = whole("accumulate", accumulate, 1)
        self._loader, self._place = prepared(loader)
        self._positioned = positioned(self._loader)
        self._first = self._positioned.state_dict()
        self._own: Any = own
        self._seed, self._rank = seed, rank
        self._iterator: Iterator[Any] | None = None
        self._next: int | None = None

    def read(self, _epoch: int, position: int) -> Any:
        """The batch of a step, or its list of batches.

        Raises:
            UsageError: the loader is empty.
        """
        if position != self._next:
            self._positioned.load_state_dict(self._own.position or self._first)
            self._iterator = iter(self._loader)  # which draws a number
        with random_numbers_of(self._seed, self._rank(), position):
            found = [self._place(self._read()) for _ in range(self._accumulate)]
        self._own.position = self._positioned.state_dict()
        self._next = position + 1
        return found[0] if self._accumulate == 1 else found

    def _read(self) -> Any:
        for _ in range(2):
            assert self._iterator is not None
            for batch in self._iterator:
                return batch
            self._iterator = iter(self._loader)
        raise UsageError(f"session.batches(): {type(self._loader).__name__} gives no batch")

    def close(self) -> None:
        """Drops the iterator, and with it the loader's workers."""
        self._iterator = self._next = None


def is_stream(loader: Any) -> bool:
    """Whether the batches must be read sequentially: the loader has ``state_dict()``, or its dataset has no indices."""
    own, _place = prepared(loader)
    return _has_state(own) or isinstance(getattr(own, "dataset", None), IterableDataset) or not hasattr(own, "dataset")


def positioned(loader: Any) -> Any:
    """The object that holds a loader's position: the loader, or its dataset if only this process reads it.

    Raises:
        ConfigurationError: neither has ``state_dict()`` and ``load_state_dict()``.
    """
    if _has_state(loader):
        return loader
    if isinstance(loader, DataLoader) and _has_state(loader.dataset) and loader.num_workers == 0:
        return loader.dataset
    raise ConfigurationError(
        f"session.batches(steps=...): {type(loader).__name__} has no position to come back to: give it, or its dataset "
        "with num_workers=0, state_dict() and load_state_dict(), as torchdata's StatefulDataLoader has them"
    )


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
