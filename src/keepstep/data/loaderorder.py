"""The order in which a torch ``DataLoader`` reads its dataset, epoch by epoch, found again from any batch on.

It is the loader's own: its batch sampler is asked, after ``set_epoch()`` where it has one. What a sampler draws from a
generator of its own (``DataLoader(generator=...)``) is what it draws in a plain loop over the same loader. What it
would draw from the process's generators it draws from (seed, epoch) instead, so that a rollback finds it again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.data.numbers import digest, whole
from keepstep.data.reader import BatchReader, LoaderWorkers, Request
from keepstep.errors import ConfigurationError, UsageError


class LoaderOrder:
    """The requests of a loader's batches, by number: epoch e has those from e * num_batches on."""

    def __init__(self, loader: DataLoader[Any], epochs: int, seed: int) -> None:
        """Args:
            loader: of a map-style dataset. It is not iterated itself.
            epochs: how often the dataset is read.
            seed: of what samplers draw from the process's generators.

        Raises:
            ConfigurationError: the loader's order cannot be found again, or has no length; or no epoch is wanted.
        """
        self.epochs = whole("epochs", epochs, 1)
        self._seed = seed
        self._sampler: Any = _sampler_of(loader)
        try:
            self.num_batches = len(self._sampler)
        except TypeError:
            raise ConfigurationError(
                f"session.batches(): {type(self._sampler).__name__} has no length: define __len__, its batches"
            ) from None
        if self.num_batches == 0:
            raise ConfigurationError("session.batches(): the loader has no batch: lower batch_size, or drop_last=False")
        parts = (self._sampler, loader.sampler, getattr(self._sampler, "sampler", None))
        self._parts = list({id(part): part for part in parts if part is not None}.values())
        generators = (loader.generator, *(getattr(part, "generator", None) for part in self._parts))
        self._generators = list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())
        self._loader_generator = loader.generator
        self._keeps_workers = loader.persistent_workers and loader.num_workers > 0
        self._begins = [self._generator_states()]
        """Of the generators, at the beginning of each epoch that was come to."""

    def requests(self, first: int, rank: int) -> Iterator[Request]:
        """That batch and all that follow.

        Args:
            first: number of the batch.
            rank: whose: it goes into the requests.

        Raises:
            UsageError: the sampler's epochs do not have as many batches as its length says.
        """
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

    def _epoch(self, epoch: int, skipped: int) -> Iterator[Any]:
        """The batches of an epoch in order, without so many at its beginning."""
        while self._generators and len(self._begins) <= epoch:  # what earlier epochs draw from them
            for _ in self._drawn(len(self._begins) - 1, self.num_batches):
                pass
        yield from self._drawn(epoch, skipped)

    def _drawn(self, epoch: int, skipped: int) -> Iterator[Any]:
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for generator, state in zip(self._generators, self._begins[epoch] if self._generators else (), strict=True):
            generator.set_state(state)
        if self._loader_generator is not None and not (self._keeps_workers and epoch > 0):
            # torch's loader takes the workers' seed from it first.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
        yield from _apart(lambda: itertools.islice(self._sampler, skipped, None), digest("order", self._seed, epoch))
        if len(self._begins) == epoch + 1:
            self._begins.append(self._generator_states())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _sampler_of(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"session.batches({type(loader).__name__}): give it a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"session.batches(): {type(loader.dataset).__name__} is an IterableDataset, in which no batch can be found "
            "again. Give the dataset an index (__getitem__ and __len__); or use session.steps() and protect a loader "
            "that has state_dict(), such as torchdata's StatefulDataLoader"
        )
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def _apart(begin: Callable[[], Iterator[Any]], key: bytes) -> Iterator[Any]:
    """Iterates with random numbers of its own, which nothing that the process draws meanwhile changes."""
    own: tuple[Any, Any, torch.Tensor] | None = None
    iterator: Iterator[Any] | None = None
    while True:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            if own is None:
                numbers = np.frombuffer(key, dtype="<u4")
                random.seed(key)
                np.random.seed(numbers[:8])
                torch.default_generator.manual_seed(int(numbers[8]))
            else:
                random.setstate(own[0])
                np.random.set_state(own[1])
                torch.set_rng_state(own[2])
            iterator = iterator or begin()
            try:
                item = next(iterator)
            except StopIteration:
                return
            own = random.getstate(), np.random.get_state(), torch.get_rng_state()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
        yield item


def reader_of(loader: DataLoader[Any], seed: int) -> BatchReader:
    """What reads a loader's batches as the loader would, with random numbers of each batch's own."""
    workers = LoaderWorkers(
        loader.num_workers,
        loader.timeout,
        loader.prefetch_factor or 2,
        loader.multiprocessing_context,
        loader.worker_init_fn,
    )
    return BatchReader(loader.dataset, loader.collate_fn, seed, workers, pin_memory=loader.pin_memory)
