"""Reads batches of a map-style dataset, in the calling thread or ahead of time in loader workers.

While samples are read and collated, Python's, NumPy's and torch's CPU random numbers are seeded from (seed, rank,
number of the batch) and afterwards put back. So random augmentation belongs to the batch: it is the same with any
number of workers, and the training step's own random numbers do not depend on the loader.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from keepstep.data.numbers import digest
from keepstep.data.sources import PROCESS_SOURCES, seed_process
from keepstep.errors import PeerLost
from keepstep.parent_death import end_with_parent


class MapDataset(Protocol):
    """What a dataset must have: a length, and a sample for every index below it.

    A dataset that also has ``__getitems__(list[int])`` is asked for whole batches, as torch's own loader does.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Request(NamedTuple):
    """One batch."""

    number: int
    """In the order of the training, from 0."""
    rank: int
    """Whose batch: it seeds the random numbers, with ``number``."""
    indices: Any
    """Of its samples; or the one index under which the dataset has the whole batch."""


@dataclasses.dataclass(frozen=True)
class LoaderWorkers:
    """The processes that read batches ahead of time."""

    num: int
    """How many; 0 reads in the calling thread."""
    timeout_s: float = 0.0
    """The longest wait for one batch; 0: without an end."""
    prefetch_factor: int = 2
    """How many batches each of them prepares ahead."""
    context: Any = None
    """A start method or context of ``multiprocessing``."""
    init: Callable[[int], None] | None = None
    """Called in each of them with its number."""


class BatchReader:
    """Reads batches in the order of their numbers, and starts over where another one is asked for.

    Loader workers start at the first batch, and prefetch what comes next. Asking for another batch than the next (after
    a rollback), or for another rank, throws away what was prefetched and goes on from there in the same processes. They
    end with `close`, with the reader, or with this process, however that ends (on Linux, if they were started from the
    main thread). Use it from one thread at a time.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        seed: int,
        workers: LoaderWorkers,
        *,
        collates: bool = True,
        pin_memory: bool = False,
        restores: bool = True,
    ) -> None:
        """Args:
        dataset: map-style. Loader workers get a copy of it.
        collate: makes a batch of a list of samples; without ``collates``, of what the dataset gives for one index.
        seed: of the random numbers.
        workers: which loader workers there are.
        collates: whether a request has the indices of several samples.
        pin_memory: as for torch's loader.
        restores: puts the process's random numbers back after each batch: it takes 0.1 ms, and is of no use where
            a step reseeds them before it draws any.
        """
        self._batches = _Batches(dataset, collate, seed, collates, restores)
        self._order = _Order()
        self._workers, self._pin_memory = workers, pin_memory
        self._loader: DataLoader[Any] | None = None
        self._ahead: Any = None
        self._awaited: tuple[int, int] | None = None
        """The number and the rank of the batch that comes next."""

    def read(self, number: int, rank: int, requests: Callable[[], Iterator[Request]]) -> Any:
        """The batch of that number. The caller owns it.

        An exception of the dataset or of ``collate`` comes through (from a loader worker as the same type, its
        traceback in the message).

        Args:
            number: of the batch.
            rank: whose.
            requests: gives that batch and all that follow, if reading starts over.

        Raises:
            PeerLost: the loader workers did not answer in time (it takes up to 5 s more to end those that hang), or one
                of them died.
        """
        complete = False
        try:
            if self._ahead is None or self._awaited != (number, rank):
                self._begin(requests)
            batch = next(self._ahead)
            self._awaited = (number + 1, rank)
            complete = True
            return batch
        except RuntimeError as error:
            # torch has no type of its own for these two.
            if str(error).startswith("DataLoader timed out"):
                raise PeerLost(
                    self._lost(number, rank, f"did not answer within {self._workers.timeout_s:g} s")
                ) from error
            if str(error).startswith("DataLoader worker (pid"):
                raise PeerLost(self._lost(number, rank, f"died ({error})")) from error
            raise
        finally:
            if not complete:
                # What the processes would send next is not known: the next call starts new ones.
                self.close()

    def close(self) -> None:
        """Ends the loader workers, if there are any; a later `read` starts new ones.

        A worker that does not leave by itself within 5 s (torch's figure) is terminated.
        """
        ahead, self._ahead, self._loader = self._ahead, None, None
        if ahead is not None and self._workers.num:
            # torch has no public name for it. Left to the garbage collector, which may come late (a traceback can hold
            # the iterator) and closes the queues first, the workers are not told and each costs 5 s.
            ahead._shutdown_workers()

    def _begin(self, requests: Callable[[], Iterator[Request]]) -> None:
        self._order.requests = requests
        if self._workers.num == 0 and not self._pin_memory:
            self._ahead = map(self._batches.__getitem__, requests())  # torch's loader takes 0.05 ms more for each
            return
        if self._loader is None and self._workers.num == 0:
            self._loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._order,
                collate_fn=_unchanged,
                generator=torch.Generator(),
                pin_memory=self._pin_memory,
            )
        elif self._loader is None:
            # The signal comes when the thread that started a process ends, which only the main thread never does early.
            ends_with_us = threading.current_thread() is threading.main_thread()
            self._loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._order,
                num_workers=self._workers.num,
                collate_fn=_unchanged,
                timeout=self._workers.timeout_s,
                worker_init_fn=functools.partial(_begin_worker, ends_with_us, self._workers.init),
                multiprocessing_context=self._workers.context,
                # Without its own generator it would draw a seed from the training step's.
                generator=torch.Generator(),
                prefetch_factor=self._workers.prefetch_factor,
                persistent_workers=True,
                pin_memory=self._pin_memory,
            )
        self._ahead = iter(self._loader)

    def _lost(self, number: int, rank: int, what: str) -> str:
        return (
            f"a loader worker of rank {rank} {what} at batch {number}; "
            f"look at the dataset's own reads, or raise the timeout or lower num_workers ({self._workers.num})"
        )


class _Batches(torch.utils.data.Dataset[Any]):
    """Collated batches by their requests; what a loader worker gets a copy of."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, collates: bool, restores: bool) -> None:
        self.dataset, self._collate, self._seed, self._collates = dataset, collate, seed, collates
        self._restores = restores

    def __getitem__(self, request: Request) -> Any:
        if not self._restores:
            seed_process(digest("augmentation", self._seed, request.rank, request.number))
            return self._collate(self._samples(request.indices))
        with random_numbers_of(self._seed, request.rank, request.number):
            return self._collate(self._samples(request.indices))

    def _samples(self, indices: Any) -> Any:
        if not self._collates:
            return self.dataset[indices]
        fetch_all: Callable[[Any], Any] | None = getattr(self.dataset, "__getitems__", None)
        return fetch_all(indices) if fetch_all else [self.dataset[index] for index in indices]


class _Order(Sampler[Request]):
    """The order in which loader workers prefetch."""

    def __init__(self) -> None:
        self.requests: Callable[[], Iterator[Request]] = lambda: iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests()


@contextmanager
def random_numbers_of(seed: int, rank: int, number: int) -> Iterator[None]:
    """Seeds the three CPU generators that datasets draw from, and puts back what was there before."""
    before = [source.get() for source in PROCESS_SOURCES]
    try:
        seed_process(digest("augmentation", seed, rank, number))
        yield
    finally:
        for source, state in zip(PROCESS_SOURCES, before, strict=True):
            source.put(state)


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(ends_with_us: bool, init_worker: Callable[[int], None] | None, worker: int) -> None:
    """Has the kernel kill this loader worker with the rank it reads for, and calls the user's own function.

    torch's own watchdog looks every 5 s. Until then the orphan of a killed rank would hold what it inherited:
    the rank's sockets, so that its peers see no end of the connection, and device memory that a replacement may need.
    """
    if ends_with_us and sys.platform == "linux":
        end_with_parent(os.getppid())
    # Datasets and worker_init_fn look themselves up there: they are to find the user's own, not what wraps it.
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if init_worker is not None:
        init_worker(worker)
