"""The batch of a rank at a step: samples in the order of `keepstep.data.StepSampler`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from torch.utils.data import IterableDataset, default_collate

from keepstep.data.numbers import whole
from keepstep.data.order import StepSampler
from keepstep.data.reader import BatchReader, LoaderWorkers, MapDataset, Request
from keepstep.errors import ConfigurationError

# Long enough for a slow file system to deliver a first batch, short enough for a person to wait for the error.
DEFAULT_TIMEOUT_S = 120.0


class LoaderOptions(TypedDict, total=False):
    """The rarer arguments of `StepLoader`; they matter only with ``num_workers > 0``."""

    timeout_s: float
    """The longest wait for one batch, in seconds (120)."""
    prefetch_factor: int
    """How many batches each loader worker prepares ahead (2)."""
    start_method: str | None
    """``fork``, ``forkserver`` or ``spawn``; None (the default) takes Python's own default. All but ``fork`` import
    the training script again, which must then stand behind ``if __name__ == "__main__":``."""


class StepLoader:
    """The batch of a rank at a step, from a map-style dataset, read here or ahead of time in loader workers.

    While the loader reads and collates samples, it seeds Python's, NumPy's and torch's CPU generators from (seed, rank,
    step). Then it restores the generators. So random augmentation belongs to the batch as well: it is the same with any
    number of workers, and the training step's own random numbers do not depend on the loader.

    With ``num_workers > 0`` the loader workers start at the first batch and prefetch in the order of the steps. If the
    next request is for another step (after a rollback) or for another rank, the loader drops the prefetched batches and
    continues from the new one in the same processes. The processes end with `close`, when the loader is deleted, or
    when this process ends for any reason (on Linux, if the main thread started them).

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
        self._reader = BatchReader(
            dataset,
            collate_fn or default_collate,
            self.sampler.seed,
            LoaderWorkers(
                whole("num_workers", num_workers, 0),
                self.timeout_s,
                whole("prefetch_factor", options.get("prefetch_factor", 2), 1),
                options.get("start_method"),
            ),
        )

    def batch(self, step: int, rank: int) -> Any:
        """The collated batch of `batch_size` samples that `rank` reads at `step`.

        The caller owns the batch. An exception in the dataset or in `collate_fn` propagates. From a loader worker it
        has the same type, and the worker's traceback is in the message.

        Raises:
            ConfigurationError: `step` is negative, or `rank` out of range.
            PeerLost: the loader workers did not answer within `timeout_s`, or one of them died. To end workers that
                hang takes up to 5 s more.
        """
        step = whole("step", step, 0)
        rank = whole("rank", rank, 0, self.sampler.world_size - 1)
        return self._reader.read(step, rank, lambda: self._requests(step, rank))

    def _requests(self, step: int, rank: int) -> Iterator[Request]:
        for number in itertools.count(step):
            yield Request(number, rank, self.sampler.indices(number, rank).tolist())

    def close(self) -> None:
        """End the loader workers, if there are any; a later `batch` starts new ones.

        A worker that does not leave by itself within 5 s (torch's figure) is terminated.
        """
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _size(dataset: MapDataset) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(f"{type(dataset).__name__} is not a map-style dataset: samples must have an index")
    try:
        return len(dataset)
    except TypeError:
        raise ConfigurationError(f"{type(dataset).__name__} has no length: define __len__") from None
