"""Samplers that are made on a spare: the rank whose samples they are to give is not known yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data.distributed import DistributedSampler


def have_samplers_wait(rank: Callable[[], int]) -> None:
    """Has every ``DistributedSampler`` that is made from now on ask for its rank when it is used, and not before.

    On a spare: the rank is not known yet, and asking for it where the sampler is made would hold up the script there.

    Args:
        rank: gives this process's rank, and waits for it.
    """
    make = DistributedSampler.__init__

    def made(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *more: Any, **options: Any
    ) -> None:
        make(self, dataset, num_replicas, 0 if rank is None else rank, *more, **options)
        if rank is None:
            self.rank = None

    for name, value in (("__init__", made), ("rank", _LateRank(rank))):
        setattr(DistributedSampler, name, value)


class _LateRank:
    """The attribute ``rank``: where it is None, the one that this process gets."""

    def __init__(self, wait: Callable[[], int]) -> None:
        self._wait = wait

    def __get__(self, sampler: Any, owner: type) -> int:
        if sampler is None or "rank" not in vars(sampler):
            raise AttributeError(f"{owner.__name__} has no rank yet")
        held: int | None = vars(sampler)["rank"]
        if held is None:
            held = vars(sampler)["rank"] = self._wait()
        return held

    def __set__(self, sampler: Any, value: int | None) -> None:
        vars(sampler)["rank"] = value
