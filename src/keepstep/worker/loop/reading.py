"""Random access to the batches of a torch ``DataLoader``, by step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from keepstep.data.loaderorder import LoaderOrder, samplers_of
from keepstep.data.numbers import whole
from keepstep.data.order import StepSampler
from keepstep.data.reader import BatchReader
from keepstep.errors import ConfigurationError
from keepstep.worker.loop.wrapped import prepared


class Reading:
    """Reads the batches of a step of an epoch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        epochs: int,
        accumulate: int,
        seed: int,
        rank: Callable[[], int],
        *,
        updates: int = 1,
        restores: bool = True,
    ) -> None:
        """Args:
        loader: see `Session.batches`.
        epochs: see there.
        accumulate: see there.
        seed: seed of the session.
        rank: returns the rank whose samples this process reads. First called when the first batch is read.
        updates: see `Session.batches`.
        restores: see `BatchReader`.

        Raises:
            ConfigurationError: the loader's order is not reproducible, or a number is below 1.
        """
        self._accumulate = whole("accumulate", accumulate, 1)
        self.updates = whole("updates", updates, 1)
        """Steps that get the same batch."""
        self._next: tuple[tuple[int, int], list[Any]] | None = None
        """Epoch and position of the next step, if it gets the same batch, and what the loader has given for it."""
        loader, self._place = prepared(loader)
        self._order = LoaderOrder(loader, epochs, seed)
        self._reader = BatchReader(loader, seed, restores=restores)
        self._rank = rank

    @property
    def epochs(self) -> int:
        """Number of epochs of the whole training."""
        return self._order.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each epoch. With ``accumulate`` the last one may have fewer batches."""
        return -(-self._order.num_batches // self._accumulate) * self.updates

    def read(self, epoch: int, position: int) -> Any:
        """Returns the batch of a step, or its list of batches.

        A repeated step reads its batch again. The script may have changed the former objects in ways that keepstep
        cannot detect, such as ``batch.pop("labels")`` or ``x.data.mul_(2)``.

        Args:
            epoch: epoch of the step, from 0.
            position: position of the step in its epoch, from 0.
        """
        group, update = divmod(position, self.updates)
        given = self._next[1] if self._next is not None and self._next[0] == (epoch, position) else None
        if given is None:
            given = self._given(epoch, group)
        is_last = update == self.updates - 1
        self._next = None if is_last else ((epoch, position + 1), copy.deepcopy(given))
        found = [self._place(batch) for batch in given]
        return found[0] if self._accumulate == 1 else found

    def _given(self, epoch: int, group: int) -> list[Any]:
        first = group * self._accumulate
        last = min(first + self._accumulate, self._order.num_batches)
        begin, rank = epoch * self._order.num_batches, self._rank()
        return [
            self._reader.read(number, rank, functools.partial(self._order.requests, number, rank))
            for number in range(begin + first, begin + last)
        ]

    def close(self) -> None:
        """Ends the loader's workers."""
        self._reader.close()


def check_replicas(loader: DataLoader[Any], data_world_size: int, world_size: int) -> None:
    """Refuses a sampler that shares out the samples among another number of ranks than have samples of their own.

    Raises:
        ConfigurationError: a ``DistributedSampler`` splits the samples among all ranks, which is its default, but some
            ranks (tensor- or pipeline-parallel peers) must read the same samples; or a `StepSampler` splits them among
            another number than that of the data-parallel ranks.
    """
    own = prepared(loader)[0]
    computed = next((part for part in (own.batch_sampler, own.sampler) if type(part) is StepSampler), None)
    if computed is not None and computed.world_size != data_world_size:
        raise ConfigurationError(
            f"session.batches(): the StepSampler shares out the samples among {computed.world_size} ranks, and "
            f"{data_world_size} have samples of their own: give it world_size=session.data_world_size"
        )
    replicas = (part.num_replicas for part in samplers_of(own) if isinstance(part, DistributedSampler))
    if data_world_size < world_size and world_size in replicas:
        raise ConfigurationError(
            f"session.batches(): the DistributedSampler shares out the samples among all {world_size} ranks, and only "
            f"{data_world_size} have samples of their own: give it num_replicas=session.data_world_size and "
            "rank=session.data_rank"
        )
