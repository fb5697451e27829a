"""The order in which a torch ``DataLoader`` reads its dataset, reproducible from any batch of any epoch.

It comes from the loader's own samplers, after ``set_epoch()`` if they have it. Draws from their own generators
(``DataLoader(generator=...)``) are those of a plain loop over the same loader. Draws from the process's generators are
seeded from (seed, epoch) instead, so that a rollback can reproduce them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from keepstep.data.numbers import digest, whole
from keepstep.data.order import StepSampler
from keepstep.data.reader import Request
from keepstep.data.sources import PROCESS_SOURCES, RandomSource, seed_process, source_of
from keepstep.errors import ConfigurationError, UsageError
from keepstep.typenames import is_named

# A rollback goes back a few epochs at most. For an earlier epoch the order is drawn again from the first epoch on.
NUM_BEGINS = 8

# Batches requested from a sampler at a time: saving and restoring all generators takes 0.1 ms (2 cores, November 2026).
NUM_AHEAD = 64

# Samplers that keep no state between epochs, except in a generator.
_STATELESS = {
    *(data.BatchSampler, data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler),
    *(data.WeightedRandomSampler, DistributedSampler, StepSampler, list, tuple, range),
}
# Likewise, after set_epoch(). Iterating the second one twice over 500,000 batches would take 5.6 s (2 cores, 2026).
_STATELESS_NAMES = {"accelerate.data_loader.SeedableRandomSampler", "accelerate.data_loader.BatchSamplerShard"}


class LoaderOrder:
    """The requests of a loader's batches, by number: epoch e has those from e * num_batches on."""

    def __init__(self, loader: DataLoader[Any], epochs: int, seed: int) -> None:
        """Args:
            loader: a loader of a map-style dataset. This object does not iterate it.
            epochs: number of epochs, at least 1.
            seed: seed of the process's generators while samplers draw from them.

        Raises:
            ConfigurationError: the loader's order is not reproducible, its sampler has no length or no batches, or
                ``epochs`` is below 1.
        """
        self.epochs = whole("epochs", epochs, 1)
        self._seed = seed
        self._sampler: Any = _sampler_of(loader)
        try:
            self.num_batches = len(self._sampler)
        except TypeError:
            raise ConfigurationError(
                f"session.batches(): {type(self._sampler).__name__} has no length: define __len__() as the number of "
                "batches in an epoch"
            ) from None
        if self.num_batches == 0:
            raise ConfigurationError("session.batches(): the loader has no batch: lower batch_size, or drop_last=False")
        self._samplers = samplers_of(loader)
        own = {id(each): each for each in (loader.generator, *itertools.chain(*map(_values, self._samplers)))}
        self._own = [source for source in map(source_of, own.values()) if source is not None]
        self._num_workers, self._generator = loader.num_workers, loader.generator
        self._keeps_workers = loader.persistent_workers
        self._begins = {0: [source.get() for source in self._own]}
        """States of the samplers' own generators at the beginning of epochs: the first and the last few."""

    def requests(self, first: int, rank: int) -> Iterator[Request]:
        """Yields the request of a batch and of all later batches.

        A `StepSampler` computes them; from any other sampler they are drawn.

        Args:
            first: number of the first batch.
            rank: the rank, part of each request.

        Raises:
            ConfigurationError: ``first`` is 0, and the sampler gives another order each time it is iterated.
            UsageError: the sampler's epochs do not have as many batches as its length says.
        """
        if type(self._sampler) is StepSampler:  # a subclass may have an __iter__ of its own
            numbers = range(first, self.epochs * self.num_batches)
            return (Request(number, rank, self._sampler.indices(number, rank).tolist()) for number in numbers)
        if first == 0:
            self._ask_twice()
        return self._drawn_requests(first, rank)

    def _drawn_requests(self, first: int, rank: int) -> Iterator[Request]:
        for epoch in range(first // self.num_batches, self.epochs):
            number, end = max(first, epoch * self.num_batches), (epoch + 1) * self.num_batches
            for indices in self._epoch(epoch, number % self.num_batches):
                if number == end:
                    raise UsageError(self._miscounted("more"))
                yield Request(number, rank, indices)
                number += 1
            if number < end:
                raise UsageError(self._miscounted("fewer"))

    def _miscounted(self, how: str) -> str:
        name = type(self._sampler).__name__
        return f"session.batches(): {name} says that an epoch has {self.num_batches} batches, and it has {how}"

    def _ask_twice(self) -> None:
        """Refuses a sampler with hidden state between epochs, such as a counter or a list that it shuffles."""
        unknown = next((part for part in self._samplers if not _is_stateless(type(part))), None)
        if unknown is None:
            return
        once, again = (list(self._drawn(0, 0)) for _ in range(2))
        if not _is_same(once, again):
            raise ConfigurationError(
                f"session.batches(): {type(unknown).__name__} gives another order when it is asked for the same epoch "
                "again, so that no batch of it could be found again. Let its order follow from set_epoch(epoch), or "
                "from a generator that is one of its attributes"
            )

    def _epoch(self, epoch: int, skipped: int) -> Iterator[Any]:
        """Yields the batches of an epoch in order, without the first ``skipped`` ones."""
        if self._own:  # advances these generators as the earlier epochs do
            known = max(begin for begin in self._begins if begin <= epoch)
            for earlier in range(known, epoch):
                for _ in self._drawn(earlier, self.num_batches):
                    pass
        yield from self._drawn(epoch, skipped)

    def _drawn(self, epoch: int, skipped: int) -> Iterator[Any]:
        """As `_epoch`, after all earlier epochs were drawn.

        Random numbers that the script draws meanwhile do not change the order, and the order does not change them.
        """
        sources = (*PROCESS_SOURCES, *self._own)
        iterator: Iterator[Any] | None = None
        inside: list[Any] = []
        while True:
            outside = [source.get() for source in sources]
            try:
                if iterator is None:
                    iterator = itertools.islice(self._begun(epoch), skipped, None)
                else:
                    _put(sources, inside)
                ahead = list(itertools.islice(iterator, NUM_AHEAD))
                if not ahead:
                    self._note_begin(epoch + 1)
                    return
                inside = [source.get() for source in sources]
            finally:
                _put(sources, outside)
            yield from ahead

    def _begun(self, epoch: int) -> Iterator[Any]:
        seed_process(digest("order", self._seed, epoch))
        if self._own:
            _put(self._own, self._begins[epoch])
        for part in self._samplers:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        iterator: Iterator[Any] = iter(self._sampler)
        if self._num_workers and self._keeps_workers and epoch > 0:
            return iterator
        # torch's loader draws the seed of its workers here, and a second number when they have started.
        if self._generator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if self._num_workers:
            iterator = iter(self._sampler)
        return iterator

    def _note_begin(self, epoch: int) -> None:
        self._begins.pop(epoch, None)
        self._begins[epoch] = [source.get() for source in self._own]
        for oldest in list(self._begins)[1:-NUM_BEGINS]:
            del self._begins[oldest]


def _is_stateless(kind: type) -> bool:
    return kind in _STATELESS or f"{kind.__module__}.{kind.__qualname__}" in _STATELESS_NAMES


def _sampler_of(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"session.batches({type(loader).__name__}): give it a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"session.batches(): {type(loader.dataset).__name__} is an IterableDataset, in which no batch can be found "
            "again. Give the dataset an index (__getitem__ and __len__); or use session.steps() and protect a loader "
            "that has state_dict(), such as torchdata's StatefulDataLoader"
        )
    if type(loader).__iter__ is not DataLoader.__iter__ and not is_named(loader, "StatefulDataLoader"):
        raise ConfigurationError(
            f"session.batches(): {type(loader).__name__} changes what a DataLoader gives, by an __iter__ of its own, "
            "which would not be called: give the DataLoader without it"
        )
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The loader's samplers, and the samplers nested in them."""
    found: dict[int, Any] = {}
    waiting = [loader.batch_sampler, loader.sampler]
    while waiting:
        part = waiting.pop(0)
        if part is not None and id(part) not in found:
            found[id(part)] = part
            named = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
            waiting += [*named, *(value for value in _values(part) if isinstance(value, data.Sampler))]
    return list(found.values())


def _values(part: Any) -> list[Any]:
    """An object's attributes, and the elements of lists of samplers among them."""
    values = list(getattr(part, "__dict__", {}).values())
    lists = (value for value in values if isinstance(value, list | tuple) and value)
    return [*values, *itertools.chain(*(value for value in lists if isinstance(value[0], data.Sampler)))]


def _is_same(one: Any, other: Any) -> bool:
    """Whether indices are equal: numbers, arrays, and lists of both."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays and tensors compare element by element
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(_is_same, one, other))
        return np.array_equal(one, other)


def _put(sources: Sequence[RandomSource], states: list[Any]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.put(state)
