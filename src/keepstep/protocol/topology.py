"""Who holds what: ranks, shards and replica groups, and the choice of a spare for a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker is: the failure domains it belongs to, smallest last."""

    node: str


def replica_groups(shard_of: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each shard, in rank order. Plain DDP: one shard, all ranks one replica group."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(shard_of):
        groups.setdefault(shard_of[rank], []).append(rank)
    return {shard: tuple(ranks) for shard, ranks in groups.items()}


def choose_spare(lost: Placement, spares: Mapping[int, Placement], node_at_fault: bool) -> int | None:
    """The spare that takes a lost rank's place, or None if there is none.

    A software fault prefers the lost rank's own node, a fault of the node another one; among equals the lowest
    worker number, so that the choice is the same everywhere.

    Args:
        lost: where the lost worker was.
        spares: the warm spares and where they are.
        node_at_fault: whether the node itself failed.
    """
    return min(spares, key=lambda worker: ((spares[worker].node == lost.node) == node_at_fault, worker), default=None)


def sources_of(group: Iterable[int], holders: Iterable[int]) -> tuple[int, ...]:
    """The ranks of one replica group that hold the shard at the resume step: they share the sending evenly."""
    live = set(holders)
    return tuple(rank for rank in group if rank in live)
