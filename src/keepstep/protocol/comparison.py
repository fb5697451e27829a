"""What a comparison of replicas means: which ranks hold something else than their replicas, and what follows.

In the steps of `COMPARED` and in the first two after each recovery, every rank tells all others a digest of its state
before it enters the gradient barrier. So a difference is known to all ranks or to none that is in the barrier, and the
step in which it was found can be undone everywhere.

A rank that was restored in this generation and alone differs from its replicas holds what it should not: it refuses
the state that it has loaded. Ranks that were not restored and differ have trained apart before: no recovery can tell
which of them is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COMPARED = frozenset({1, 2, 4, 8, 16})
"""Replicas are compared in these steps. State that each rank computes differently by design, such as a part of the
optimizer state or statistics of its own batches, differs after one update or a few."""


class Said(NamedTuple):
    """What one rank says of its state."""

    group: bytes
    """Ranks of the same group hold the same."""
    digest: bytes
    is_restored: bool
    """Whether the rank has got its state in this generation, from another rank or from a copy in memory or storage."""


class Verdict(NamedTuple):
    """What follows from what all ranks said. Without a difference it is false."""

    refused: tuple[int, ...]
    """Ranks that were restored, and do not hold what their replicas do."""
    apart: tuple[int, ...]
    """Ranks that differ from the first of their group, where ranks that were not restored differ."""
    first: dict[int, int]
    """For each of these ranks, the rank of its group that it is compared with."""

    def __bool__(self) -> bool:
        return bool(self.first)


def judge(said: Sequence[Said]) -> Verdict:
    """Judges what the ranks say of their state, in the order of ranks. Every rank comes to the same verdict."""
    groups: dict[bytes, list[int]] = {}
    for rank, each in enumerate(said):
        groups.setdefault(each.group, []).append(rank)
    refused: list[int] = []
    apart: list[int] = []
    compared_with: dict[int, int] = {}
    for ranks in groups.values():
        if len({said[rank].digest for rank in ranks}) == 1:
            continue
        stayed = [rank for rank in ranks if not said[rank].is_restored]
        first = stayed[0] if stayed else ranks[0]
        other = [rank for rank in ranks if said[rank].digest != said[first].digest]
        if len({said[rank].digest for rank in stayed}) > 1:
            apart += other
        else:
            refused += other if stayed else ranks
        compared_with |= dict.fromkeys(other, first)
    return Verdict(tuple(sorted(refused)), tuple(sorted(apart)), compared_with)


def compares(step: int, resumed_at: int, generation: int) -> bool:
    """Returns whether replicas are compared in a step.

    Args:
        step: the step.
        resumed_at: the step at which the ranks of the generation began.
        generation: the generation. Ranks that begin the job at its first step were compared as they started.
    """
    return step in COMPARED or follows_recovery(step, resumed_at, generation)


def follows_recovery(step: int, resumed_at: int, generation: int) -> bool:
    """Returns whether a step is one of the two after a recovery: of the restored state, and of what it becomes."""
    return generation > 1 and resumed_at <= step <= resumed_at + 1
