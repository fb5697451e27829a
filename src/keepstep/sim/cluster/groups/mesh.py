"""Which groups a job has: that of all ranks, and in a mesh one for each copy of the model and one for each shard."""

from __future__ import annotations

import dataclasses
import functools

from keepstep.sim.cluster.collectives import WORLD


@dataclasses.dataclass(frozen=True, slots=True)
class MeshGroup:
    """One of them."""

    name: str
    """As the real registry names it."""
    members: tuple[int, ...]
    """Their ranks."""
    holds_one_shard: bool | None
    """Whether its members are the replicas of one shard, or hold one copy of the model, in shards; None: the world."""


@functools.cache
def groups_of(shards: tuple[str, ...], has_mesh: bool) -> tuple[MeshGroup, ...]:
    """All groups of a job.

    Args:
        shards: of each rank.
        has_mesh: see `mesh_groups`.
    """
    world = MeshGroup(WORLD, tuple(range(len(shards))), None)
    return (world, *(mesh_groups(shards) if has_mesh else ()))


def mesh_groups(shards: tuple[str, ...]) -> tuple[MeshGroup, ...]:
    """The groups of HSDP. The n-th ranks of all shards hold the n-th copy.

    Args:
        shards: of each rank.
    """
    replicas: dict[str, list[int]] = {}
    copies: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        copies.setdefault(len(replicas.setdefault(shard, [])), []).append(rank)
        replicas[shard].append(rank)
    return (*(_group(ranks, False) for ranks in copies.values()), *(_group(ranks, True) for ranks in replicas.values()))


def _group(ranks: list[int], holds_one_shard: bool) -> MeshGroup:
    return MeshGroup(f"{'-'.join(map(str, ranks))}.0", tuple(ranks), holds_one_shard)
