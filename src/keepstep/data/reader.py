"""Reads batches as a torch ``DataLoader`` would, in any order, in the calling thread or ahead of time in its workers.

While the reader loads and collates samples, it seeds Python's, NumPy's and torch's CPU generators from (seed, rank,
number of the batch). Then it restores the generators. So random augmentation belongs to the batch: it is the same with
any number of workers, and the training step's own random numbers do not depend on the loader.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from keepstep.data.numbers import digest
from keepstep.data.sources import PROCESS_SOURCES, seed_process
from keepstep.errors import PeerLost
from keepstep.programs import end_with_parent


class Request(NamedTuple):
    """The request for one batch."""

    number: int
    """Number of the batch in the training, from 0."""
    rank: int
    """The rank that reads the batch. It seeds the generators, together with ``number``."""
    indices: Any
    """The indices of the samples; or the one index under which the dataset returns the whole batch."""


class BatchReader:
    """Reads batches in order. A request for a batch out of order restarts the reading there.

    The loader workers start at the first batch and prefetch the following ones. If the next request is for another
    batch (after a rollback) or for another rank, the reader drops the prefetched batches and continues from the new one
    in the same processes. The processes end with `close`, when the reader is deleted, or when this process ends for any
    reason (on Linux, if the main thread started them). Use the reader from one thread at a time.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, restores: bool = True) -> None:
        """Args:
        loader: of a map-style dataset. Its dataset, ``collate_fn``, workers and other settings are used, but not its
            sampler. It is not iterated.
        seed: seed of the random numbers.
        restores: whether to restore the process's generators after each batch. This takes 0.1 ms, and is unnecessary
            if each step reseeds them before it draws random numbers.
        """
        self._settings = loader
        self._batches = _Batches(loader, seed, restores)
        self._order = _Order()
        self._loader: DataLoader[Any] | None = None
        self._ahead: Any = None
        self._awaited: tuple[int, int] | None = None
        """Number and rank of the next batch."""

    def read(self, number: int, rank: int, requests: Callable[[], Iterator[Request]]) -> Any:
        """Returns a batch. The caller owns it.

        An exception in the dataset or in ``collate`` propagates. From a loader worker it has the same type, and the
        worker's traceback is in the message.

        Args:
            number: number of the batch.
            rank: the rank that reads it.
            requests: returns the requests of this batch and all later ones. Called only if the reading restarts.

        Raises:
            PeerLost: the loader workers did not answer in time, or one of them died. To end workers that hang takes up
                to 5 s more.
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
            # torch raises a plain RuntimeError in both cases.
            if str(error).startswith("DataLoader timed out"):
                raise PeerLost(
                    self._lost(number, rank, f"did not answer within {self._settings.timeout:g} s")
                ) from error
            if str(error).startswith("DataLoader worker (pid"):
                raise PeerLost(self._lost(number, rank, f"died ({error})")) from error
            raise
        finally:
            if not complete:
                # The state of the processes is unknown: the next call starts new ones.
                self.close()

    def close(self) -> None:
        """Ends the loader workers, if there are any; a later `read` starts new ones.

        A worker that does not leave by itself within 5 s (torch's figure) is terminated.
        """
        ahead, self._ahead, self._loader = self._ahead, None, None
        if ahead is not None and self._settings.num_workers:
            # torch has no public method for it. The garbage collector may run late (a traceback can hold the iterator).
            # It closes the queues first, so the workers get no signal, and ending each takes 5 s.
            ahead._shutdown_workers()

    def _begin(self, requests: Callable[[], Iterator[Request]]) -> None:
        settings = self._settings
        self._order.requests = requests
        if settings.num_workers == 0 and not settings.pin_memory:
            self._ahead = map(self._batches.__getitem__, requests())  # torch's loader takes 0.05 ms more for each
            return
        if self._loader is None:
            # The kernel sends the signal when the thread that started the process ends. Only the main thread lasts as
            # long as this process.
            ends_with_us = threading.current_thread() is threading.main_thread()
            self._loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._order,
                num_workers=settings.num_workers,
                collate_fn=_unchanged,
                pin_memory=settings.pin_memory,
                timeout=settings.timeout,
                worker_init_fn=functools.partial(_begin_worker, ends_with_us, settings.worker_init_fn),
                multiprocessing_context=settings.multiprocessing_context,
                # Without its own generator, the loader would draw a seed from the training step's generator.
                generator=torch.Generator(),
                prefetch_factor=settings.prefetch_factor,
                persistent_workers=settings.num_workers > 0,
            )
        self._ahead = iter(self._loader)

    def _lost(self, number: int, rank: int, what: str) -> str:
        return (
            f"a loader worker of rank {rank} {what} at batch {number}; "
            "look at the dataset's own reads, or raise the loader's timeout or lower its num_workers "
            f"({self._settings.num_workers})"
        )


class _Batches(torch.utils.data.Dataset[Any]):
    """A dataset of collated batches, indexed by request. Each loader worker gets a copy."""

    def __init__(self, loader: DataLoader[Any], seed: int, restores: bool) -> None:
        self.dataset: Any = loader.dataset
        self._collate, self._seed, self._restores = loader.collate_fn, seed, restores
        self._collates = loader.batch_sampler is not None

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
    """Seeds the CPU generators of Python, NumPy and torch inside the block, and restores them afterwards."""
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
    """Makes the kernel kill this loader worker together with its rank, and calls the user's ``worker_init_fn``.

    torch's watchdog polls only every 5 s. Until then the orphan of a killed rank would keep inherited resources open:
    the rank's sockets, so that its peers see no end of the connection, and device memory that a replacement may need.
    """
    if ends_with_us and sys.platform == "linux":
        end_with_parent(os.getppid())
    # Datasets and worker_init_fn read get_worker_info().dataset: it must be the user's dataset, not the wrapper.
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if init_worker is not None:
        init_worker(worker)
