"""The groups of a job: the group of all ranks, and in a mesh one for each copy of the model and one for each shard."""

from __future__ import annotations

import dataclasses
import functools

from keepstep.sim.cluster.collectives import WORLD


@dataclasses.dataclass(frozen=True, slots=True)
class MeshGroup:
    """A group of a job."""

    name: str
    """Its name, as in the real registry."""
    members: tuple[int, ...]
    """The ranks of its members."""
    holds_one_shard: bool | None
    """True: the members are the replicas of one shard. False: they hold one copy of the model. None: the world."""


@functools.cache
def groups_of(shards: tuple[str, ...], has_mesh: bool) -> tuple[MeshGroup, ...]:
    """Returns all groups of a job.

    Args:
        shards: the shard of each rank.
        has_mesh: whether to include `mesh_groups`.
    """
    world = MeshGroup(WORLD, tuple(range(len(shards))), None)
    return (world, *(mesh_groups(shards) if has_mesh else ()))


def mesh_groups(shards: tuple[str, ...]) -> tuple[MeshGroup, ...]:
    """Returns the groups of HSDP. The n-th ranks of all shards hold the n-th copy of the model.

    Args:
        shards: the shard of each rank.
    """
    replicas: dict[str, list[int]] = {}
    copies: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        copies.setdefault(len(replicas.setdefault(shard, [])), []).append(rank)
        replicas[shard].append(rank)
    return (*(_group(ranks, False) for ranks in copies.values()), *(_group(ranks, True) for ranks in replicas.values()))


def _group(ranks: list[int], holds_one_shard: bool) -> MeshGroup:
    return MeshGroup(f"{'-'.join(map(str, ranks))}.0", tuple(ranks), holds_one_shard)
