"""The batches of a loader with a position, for a dataset that can only be read sequentially."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.data.numbers import whole
from keepstep.data.reader import random_numbers_of
from keepstep.errors import ConfigurationError, UsageError
from keepstep.typenames import is_named
from keepstep.worker.loop.wrapped import prepared
from keepstep.worker.state import tree
from keepstep.worker.values.attributes import State

_END = object()
"""In the place of a batch: the iteration is over."""


class StreamReading:
    """Reads the batches of each step in turn.

    The loader's position is a rank-local value of `Session.state`. A repeated step and a replacement continue there.

    Loaders differ in what a position means to later epochs. With torchdata's loader it holds for the next iteration
    only; with an ``IterableDataset`` of Hugging Face's datasets every later iteration begins there. So before the job's
    first batch the loader is tried out, and at the end of an epoch the position of its beginning is loaded if need be.
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
        own: the rank-local values. ``position``: the loader's state; ``generators``: those of its generators;
            ``epoch``: what the dataset's ``set_epoch()`` was given; ``begins_as_loaded``: whether every iteration
            begins at the loaded state, None before it is known.
        seed: seed of the session.
        rank: returns the rank whose samples this process reads. First called when the first batch is read.

        Raises:
            ConfigurationError: the loader has no ``state_dict()``, or a number is below 1.
        """
        self.steps_per_epoch = whole("steps", num_steps, 1)
        self._accumulate = whole("accumulate", accumulate, 1)
        self._loader, self._place = prepared(loader)
        self._positioned = positioned(self._loader)
        self._begun_generators = self._states_of_generators()
        """As they are when the first iteration has begun."""
        self._first = copy.deepcopy(self._positioned.state_dict())
        self._own: Any = own
        self._seed, self._rank = seed, rank
        self._iterator: Iterator[Any] | None = None
        self._next: int | None = None
        self._begins_as_loaded: bool | None = None
        """The result of `_tried_out` in this process."""

    updates = 1
    """A batch of a stream is the batch of one step."""

    def read(self, _epoch: int, position: int) -> Any:
        """The batch of a step, or its list of batches.

        Raises:
            UsageError: the loader is empty.
            ConfigurationError: the loader does not go on where its state says.
        """
        own = self._own
        if own.begins_as_loaded is None:
            if self._begins_as_loaded is None:
                self._begins_as_loaded = self._tried_out()
            own.begins_as_loaded = self._begins_as_loaded
        if position != self._next:
            if own.epoch is not None:
                self._dataset.set_epoch(own.epoch)
            self._positioned.load_state_dict(copy.deepcopy(own.position or self._first))
            self._begin()
            states = own.generators if own.position else self._begun_generators
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)  # torchdata's loader restores them for this epoch, and not for the next one
        with random_numbers_of(self._seed, self._rank(), position):
            found = [self._place(self._read()) for _ in range(self._accumulate)]
        own.position, own.epoch = self._positioned.state_dict(), self._epoch
        own.generators = self._states_of_generators()
        self._next = position + 1
        return found[0] if self._accumulate == 1 else found

    @property
    def _generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers."""
        batches = getattr(self._loader, "batch_sampler", None)
        parts = (self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found = [getattr(part, "generator", None) for part in parts]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _states_of_generators(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    @property
    def _dataset(self) -> Any:
        return getattr(self._loader, "dataset", self._loader)

    @property
    def _epoch(self) -> int | None:
        """What the dataset's ``set_epoch()`` was given, if it has one: with another epoch its position means another
        sample."""
        epoch = getattr(self._dataset, "epoch", None) if callable(getattr(self._dataset, "set_epoch", None)) else None
        return epoch if type(epoch) is int else None

    def _begin(self) -> None:
        with random_numbers_of(self._seed, self._rank(), 0):  # it draws a number
            self._iterator = iter(self._loader)

    def _read(self) -> Any:
        for _ in range(3):  # the loaded position may be the end of an epoch
            assert self._iterator is not None
            for batch in self._iterator:
                return batch
            if self._own.begins_as_loaded:
                self._positioned.load_state_dict(copy.deepcopy(self._first))
            self._begin()
        self._refuse_empty()

    def _refuse_empty(self) -> NoReturn:
        raise UsageError(f"session.batches(): {type(self._loader).__name__} gives no batch")

    def _tried_out(self) -> bool:
        """Finds out what the loader's position means, with its first two batches.

        Returns:
            whether every iteration begins at the loaded state.

        Raises:
            ConfigurationError: the loader does not go on where its state says.
            UsageError: the loader is empty.
        """
        self._begin()
        self._begun_generators = self._states_of_generators()
        first = self._one()
        if first is _END:
            self._refuse_empty()
        if _has_shuffle_buffer(self._dataset):
            self._refuse("its shuffle buffer is no part of it")
        after = copy.deepcopy(self._positioned.state_dict())
        second = self._one()
        again, at = self._first_from(after), copy.deepcopy(self._positioned.state_dict())
        anew, then = self._first_from(None), copy.deepcopy(self._positioned.state_dict())
        goes_on = _are_alike(again, second) or (second is _END and _are_alike(again, first))
        if not goes_on or not _are_alike(self._first_from(self._first), first):
            self._refuse("after load_state_dict() it gives another batch than the one that came next")
        return _are_alike(then, at) if _are_alike(again, first) else _are_alike(anew, again)

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigurationError(
            f"session.batches(): {type(self._positioned).__name__} does not go on where its state_dict() says: {why}. "
            "Its state has to cover what it reads ahead: shuffle before to_iterable_dataset() and not with a buffer, "
            "map and filter in the DataLoader's collate_fn, and seed what is random for each sample, also in loader "
            "workers"
        )

    def _first_from(self, place: Any) -> Any:
        """The first batch of a new iteration, from a place, or from where it begins by itself."""
        if place is not None:
            self._positioned.load_state_dict(copy.deepcopy(place))
        self._begin()
        return self._one()

    def _one(self) -> Any:
        assert self._iterator is not None
        with random_numbers_of(self._seed, self._rank(), 0):
            return next(self._iterator, _END)

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


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a dataset of Hugging Face's datasets shuffles with a buffer, whose content its state does not hold.

    Two batches do not always show it. The names are those of datasets 4 (``datasets/iterable_dataset.py``).
    """
    found = [getattr(dataset, "_ex_iterable", None)]
    while found:
        part = found.pop()
        if is_named(part, "BufferShuffledExamplesIterable"):
            return True
        found += [inner for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())) if inner]
    return False


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two batches have the same content, bit for bit, as far as that can be seen."""
    if one is _END or other is _END:
        return one is other
    try:
        return tree.difference(_plain(one), _plain(other)) is None
    except ConfigurationError:
        return True  # a type of the script's own


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
