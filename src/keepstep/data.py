"""Training data as a pure function of (step, rank), so that after a recovery there is no position to restore.

::

    sequence     | epoch 0: a permutation of range(n)        | epoch 1: another one ...
    global batch | step 0    | step 1    | step 2    | tail  | step 3    | ...
    rank         | 0 | 1 | 2 | 0 | 1 | 2 | 0 | 1 | 2 |dropped| 0 | 1 | 2 | ...

* A **global batch** is ``world_size * batch_size`` consecutive positions of the epoch; rank r reads the r-th run of
  ``batch_size`` of them.
* An epoch has ``n // (world_size * batch_size)`` steps. The samples left over, fewer than one global batch, are
  dropped, so no sample comes twice in an epoch and every batch is full. With ``shuffle`` each epoch drops others;
  without it, always the last ones of the dataset.
* Any step of any epoch is found in constant time and memory: the permutation is computed, never stored.

`StepSampler` answers with indices, `StepLoader` with collated batches of a map-style dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from keepstep.errors import ConfigurationError, PeerLost
from keepstep.parent_death import end_with_parent

__all__ = ["LoaderOptions", "MapDataset", "StepLoader", "StepSampler", "permute"]

Indices = npt.NDArray[np.int64]

# Four rounds are the least with a proof (Luby & Rackoff 1988), and the proof is weak for small domains. NIST's FF1
# takes ten against an attacker, and the order of a training set has none. Eight keys are one BLAKE2b digest.
NUM_ROUNDS = 8

# Long enough for a slow file system to deliver a first batch, short enough for a person to wait for the error.
DEFAULT_TIMEOUT_S = 120.0


class MapDataset(Protocol):
    """What a dataset must have: a length, and a sample for every index below it.

    A dataset that also has ``__getitems__(list[int])`` is asked for whole batches, as torch's own loader does.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LoaderOptions(TypedDict, total=False):
    """The rarer arguments of `StepLoader`; they matter only with ``num_workers > 0``."""

    timeout_s: float
    """The longest wait for one batch, in seconds (120)."""
    prefetch_factor: int
    """How many batches each loader worker prepares ahead (2)."""
    start_method: str | None
    """``fork``, ``forkserver`` or ``spawn``; None (the default) takes Python's own default. All but ``fork`` import
    the training script again, which must then stand behind ``if __name__ == "__main__":``."""


def permute(positions: npt.ArrayLike, num_samples: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    """Look up positions in a pseudo-random permutation of ``range(num_samples)`` that is never built.

    The permutation is a balanced Feistel network over pairs of numbers below ``ceil(sqrt(num_samples))``, applied again
    while the result lies outside the range (cycle walking): methods 3 and 2 of J. Black and P. Rogaway, "Ciphers
    with Arbitrary Finite Domains", CT-RSA 2002. Its round function is the mixer of SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014) and its keys are a BLAKE2b digest of (seed, epoch): fit for training, not for secrecy. The
    result does not depend on the machine or on the version of a library.

    Args:
        positions: Whole numbers in [0, num_samples), in any shape.
        num_samples: The size of the range, 1 to 2**63 - 1.
        seed: Any whole number.
        epoch: Any whole number; each pair (seed, epoch) has its own permutation.

    Returns:
        A new int64 array of the shape of `positions`.

    Raises:
        ConfigurationError: `num_samples` or a position is out of range.
    """
    num_samples = _whole("num_samples", num_samples, 1, 2**63 - 1)
    given = np.asarray(positions, dtype=np.int64)
    if given.size and (given.min() < 0 or given.max() >= num_samples):
        raise ConfigurationError(f"positions must lie in [0, {num_samples}), not {given.min()} to {given.max()}")
    keys = _round_keys(seed, epoch)
    # The square is at most 2 * sqrt(num_samples) larger than the range, so a second turn is rare.
    side = np.uint64(isqrt(num_samples - 1) + 1)
    values = _encipher(given.ravel().astype(np.uint64), side, keys)
    while (outside := values >= num_samples).any():
        values[outside] = _encipher(values[outside], side, keys)
    return values.astype(np.int64).reshape(given.shape)


def _encipher(values: npt.NDArray[np.uint64], side: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permute range(side ** 2); a round is undone by subtracting what it added, so it is one to one."""
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _mix(right + key) % side) % side
    return left * side + right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Stafford's variant 13), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(_digest("permutation", seed, epoch), dtype="<u8", count=NUM_ROUNDS).astype(np.uint64)


def _digest(purpose: str, *numbers: int) -> bytes:
    """64 bytes that differ for every purpose and sequence of numbers, and are the same on every machine."""
    return hashlib.blake2b(f"keepstep.data {purpose} {[*map(operator.index, numbers)]}".encode()).digest()


def _whole(name: str, value: int, least: int | None = None, most: int | None = None) -> int:
    """Check a whole number; numpy's count, floats do not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, not {value!r}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be {allowed}, not {number}")
    return number


class StepSampler:
    """Which samples a rank reads at a step. It has no position: no answer depends on an earlier question.

    The answer depends on the world size. A job that goes on with fewer ranks reads from there on what a job of
    that size would have read at the same step.

    Args:
        num_samples: The size of the dataset, 1 to 2**63 - 1.
        batch_size: Samples per rank and step.
        world_size: Number of ranks that differ in their samples: ``session.data_world_size``.
        shuffle: Whether each epoch is permuted; otherwise every epoch is 0, 1, 2, ...
        seed: Any whole number, the same on all ranks.

    Raises:
        ConfigurationError: a number is out of range, or one global batch is larger than the dataset.
    """

    def __init__(
        self, num_samples: int, batch_size: int, world_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.num_samples = _whole("num_samples", num_samples, 0, 2**63 - 1)
        if self.num_samples == 0:
            raise ConfigurationError("the dataset is empty: there is nothing to draw a batch from")
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.world_size = _whole("world_size", world_size, 1)
        self.shuffle = shuffle
        self.seed = _whole("seed", seed)
        if self.global_batch_size > self.num_samples:
            raise ConfigurationError(
                f"a global batch takes {self.global_batch_size} samples ({self.world_size} ranks × {self.batch_size}), "
                f"the dataset has {self.num_samples}: lower batch_size to at most "
                f"{self.num_samples // self.world_size}, or take fewer ranks"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together read in one step."""
        return self.world_size * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in each epoch, at least 1."""
        return self.num_samples // self.global_batch_size

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0.

        Raises:
            ConfigurationError: `step` is negative.
        """
        return _whole("step", step, 0) // self.steps_per_epoch

    def indices(self, step: int, rank: int) -> Indices:
        """The samples of one rank at one step.

        Args:
            step: From 0, without an upper end.
            rank: In [0, world_size): ``session.data_rank``.

        Returns:
            A new int64 array of shape (batch_size,), each value in [0, num_samples).

        Raises:
            ConfigurationError: `step` is negative, or `rank` out of range.
        """
        epoch = self.epoch(step)
        rank = _whole("rank", rank, 0, self.world_size - 1)
        first = (operator.index(step) % self.steps_per_epoch * self.world_size + rank) * self.batch_size
        positions = np.arange(first, first + self.batch_size, dtype=np.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.num_samples, seed=self.seed, epoch=epoch)


class StepLoader:
    """The batch of a rank at a step, from a map-style dataset, read here or ahead of time in loader workers.

    While samples are read and collated, Python's, NumPy's and torch's CPU random numbers are seeded from (seed, rank,
    step) and afterwards put back. So random augmentation belongs to the batch as well: it is the same with any number
    of workers, and the training step's own random numbers do not depend on the loader.

    With ``num_workers > 0`` the loader workers start at the first batch and prefetch in the order of the steps.
    Asking for another step than the next (after a rollback), or for another rank, throws away what was prefetched
    and goes on from there in the same processes. They end with `close`, with the loader, or with this process,
    however that ends (on Linux, if they were started from the main thread).

    Use it from one thread at a time.

    Args:
        dataset: A map-style dataset, see `MapDataset`. Loader workers get a copy of it.
        batch_size: Samples per rank and step.
        world_size: Number of ranks that differ in their samples: ``session.data_world_size``.
        shuffle: Whether each epoch is permuted.
        seed: Any whole number, the same on all ranks.
        num_workers: Loader workers of this rank; 0 reads in the calling thread.
        collate_fn: Makes a batch from a list of samples; None takes torch's ``default_collate``.
        options: See `LoaderOptions`.

    Raises:
        ConfigurationError: the dataset has no length or is empty, or a number is out of range.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        if unknown := options.keys() - LoaderOptions.__annotations__.keys():
            raise ConfigurationError(f"StepLoader knows no option {', '.join(sorted(unknown))}")
        self.sampler = StepSampler(_size(dataset), batch_size, world_size, shuffle=shuffle, seed=seed)
        self.timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        if not self.timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be more than 0 seconds, not {self.timeout_s}")
        self._num_workers = _whole("num_workers", num_workers, 0)
        self._prefetch_factor = _whole("prefetch_factor", options.get("prefetch_factor", 2), 1)
        self._start_method = options.get("start_method")
        self._batches = _Batches(dataset, self.sampler, collate_fn or default_collate)
        self._order = _StepOrder()
        self._loader: DataLoader[Any] | None = None
        self._prefetched: Any = None

    def batch(self, step: int, rank: int) -> Any:
        """The collated batch of `batch_size` samples that `rank` reads at `step`.

        The caller owns what is returned. An exception of the dataset or of `collate_fn` comes through (from a loader
        worker as the same type, its traceback in the message).

        Raises:
            ConfigurationError: `step` is negative, or `rank` out of range.
            PeerLost: the loader workers did not answer within `timeout_s` (it takes up to 5 s more to end those that
                hang), or one of them died.
        """
        step = _whole("step", step, 0)
        rank = _whole("rank", rank, 0, self.sampler.world_size - 1)
        if self._num_workers == 0:
            return self._batches[step, rank]
        complete = False
        try:
            if self._prefetched is None or self._order.awaited != (step, rank):
                self._order.awaited = (step, rank)
                self._prefetched = iter(self._start())
            batch = next(self._prefetched)
            self._order.awaited = (step + 1, rank)
            complete = True
            return batch
        except RuntimeError as error:
            # torch has no type of its own for these two.
            if str(error).startswith("DataLoader timed out"):
                raise PeerLost(self._lost(step, rank, f"did not answer within {self.timeout_s:g} s")) from error
            if str(error).startswith("DataLoader worker (pid"):
                raise PeerLost(self._lost(step, rank, f"died ({error})")) from error
            raise
        finally:
            if not complete:
                # What the processes would send next is not known: the next call starts new ones.
                self.close()

    def close(self) -> None:
        """End the loader workers, if there are any; a later `batch` starts new ones.

        A worker that does not leave by itself within 5 s (torch's figure) is terminated.
        """
        prefetched, self._prefetched, self._loader = self._prefetched, None, None
        if prefetched is not None:
            # torch has no public name for it. Left to the garbage collector, which may come late (a traceback can hold
            # the iterator) and closes the queues first, the workers are not told and each costs 5 s.
            prefetched._shutdown_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> DataLoader[Any]:
        """torch's loader over (step, rank) pairs; `iter` of it restarts the order in the same processes."""
        if self._loader is None:
            # The signal comes when the thread that started a process ends, which only the main thread never does early.
            ends_with_us = threading.current_thread() is threading.main_thread()
            self._loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._order,
                num_workers=self._num_workers,
                collate_fn=_unchanged,
                timeout=self.timeout_s,
                worker_init_fn=_end_with_parent if ends_with_us else None,
                multiprocessing_context=self._start_method,
                # Without its own generator it would draw a seed from the training step's.
                generator=torch.Generator(),
                prefetch_factor=self._prefetch_factor,
                persistent_workers=True,
            )
        return self._loader

    def _lost(self, step: int, rank: int, what: str) -> str:
        return (
            f"a loader worker of rank {rank} {what} at step {step}; "
            f"look at the dataset's own reads, or raise timeout_s or lower num_workers ({self._num_workers})"
        )


def _size(dataset: MapDataset) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"{type(dataset).__name__} is not a map-style dataset: samples must have an index")
    try:
        return len(dataset)
    except TypeError:
        raise ConfigurationError(f"{type(dataset).__name__} has no length: define __len__") from None


class _Batches(torch.utils.data.Dataset[Any]):
    """Collated batches by (step, rank); what a loader worker gets a copy of."""

    def __init__(self, samples: MapDataset, sampler: StepSampler, collate: Callable[[list[Any]], Any]) -> None:
        self.samples = samples
        self.sampler = sampler
        self.collate = collate

    def __getitem__(self, key: tuple[int, int]) -> Any:
        step, rank = key
        indices = self.sampler.indices(step, rank).tolist()
        fetch_all: Callable[[list[int]], list[Any]] | None = getattr(self.samples, "__getitems__", None)
        with _random_numbers_of(self.sampler.seed, rank, step):
            return self.collate(fetch_all(indices) if fetch_all else [self.samples[i] for i in indices])


class _StepOrder(Sampler[tuple[int, int]]):
    """The order in which loader workers prefetch: the awaited step, then the ones after it, without an end."""

    def __init__(self) -> None:
        self.awaited = (0, 0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step, rank = self.awaited
        return zip(itertools.count(step), itertools.repeat(rank), strict=False)


@contextmanager
def _random_numbers_of(seed: int, rank: int, step: int) -> Iterator[None]:
    """Seed the three CPU generators that datasets draw from, and put back what was there before."""
    key = np.frombuffer(_digest("augmentation", seed, rank, step), dtype="<u4")
    before_python, before_numpy, before_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(key[:4].tobytes())
        np.random.seed(key[4:8])
        # Not torch.manual_seed, which would seed the accelerators too.
        torch.default_generator.manual_seed(int(key[8]))
        yield
    finally:
        random.setstate(before_python)
        np.random.set_state(before_numpy)
        torch.set_rng_state(before_torch)


def _unchanged(batch: Any) -> Any:
    return batch


def _end_with_parent(_worker: int) -> None:
    """Have the kernel kill this loader worker with the rank it reads for.

    torch's own watchdog looks every 5 s. Until then the orphan of a killed rank would hold what it inherited:
    the rank's sockets, so that its peers see no end of the connection, and device memory that a replacement may need.
    """
    if sys.platform == "linux":
        end_with_parent(os.getppid())
