"""Finds the ranks that share one computation on the same data, and the ranks that have different data.

Under tensor parallelism each rank computes a part of every layer. Random numbers for activations that all of them hold,
such as the mask of a dropout, must be equal on all, or their copies drift apart. Data-parallel ranks draw other
numbers, and so do pipeline stages, since each has its own layers. The seeds of Megatron and torchtitan follow the same
rule.

Samples follow another rule: all stages of a pipeline work on the same samples. The ranks with different samples are
those between which DDP or FSDP2 reduces the gradients, or those of ``protect(data_mesh=...)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.typenames import is_named
from keepstep.weights.memory.blocks import is_dtensor
from keepstep.worker.parallel.fsdp2 import find_fully_sharded
from keepstep.worker.parallel.pipeline import is_schedule, stages_of


def first_tensor_peer(modules: dict[str, torch.nn.Module]) -> int | None:
    """Returns the first rank of those that share this rank's computation of DTensors; None without DTensors.

    A mesh dimension of a DTensor over which FSDP2 shards or replicates is data-parallel; every other one is not.

    Args:
        modules: the protected modules, by name.
    """
    data_parallel = _groups_of_fsdp(modules)
    return min((_first_of(mesh, data_parallel) for mesh in _meshes_of_parameters(modules)), default=None)


def data_ranks(objects: dict[str, Any], shard: str) -> Sequence[int] | None:
    """Returns the ranks that differ from this one only in their samples, including this one, in order.

    The index of a rank among them is its data-parallel coordinate. With a mesh, it needs this process's rank.

    Args:
        objects: the protected objects, by name.
        shard: ``protect(shard=...)``.

    Returns:
        None if unknown: nothing that keepstep recognises reduces the gradients; or the ranks that reduce them are not
            those that remain without the peers of tensor and pipeline parallelism.
    """
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
    parts = (part for module in modules.values() for part in module.modules())
    ddp = (part.process_group for part in parts if isinstance(part, DistributedDataParallel))
    reducing = {tuple(dist.get_process_group_ranks(group)) for group in ddp}
    reducing |= {tuple(mesh.mesh.flatten().tolist()) for mesh in _meshes_of_fsdp(modules)}
    splitting = {group for group in _splitting(modules, objects) if len(group) > 1}
    all_ranks = tuple(range(dist.get_world_size()))
    if not reducing and (not shard or len(all_ranks) == 1):
        reducing = {(dist.get_rank(),) if splitting else all_ranks}
    if len(reducing) != 1:
        return None
    (found,) = reducing
    is_all = len(found) * math.prod(map(len, splitting)) == len(all_ranks)
    return found if is_all and all(len(group.intersection(found)) == 1 for group in splitting) else None


def ranks_of_mesh(mesh: Any) -> Sequence[int]:
    """Returns the ranks of ``protect(data_mesh=...)``, in the order of their coordinates.

    Raises:
        ConfigurationError: it is no mesh, this rank is not in it, or its size does not divide the world size.
    """
    if not is_named(mesh, "DeviceMesh"):
        raise ConfigurationError(f"protect(data_mesh={mesh!r}): give a DeviceMesh, such as mesh['data']")
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks or dist.get_world_size() % len(ranks):
        raise ConfigurationError(
            f"protect(data_mesh=...): a mesh of ranks {ranks}, on rank {dist.get_rank()} of {dist.get_world_size()}: "
            "give the dimensions of the job's mesh along which samples differ, such as mesh['data']"
        )
    return ranks


def _splitting(modules: dict[str, torch.nn.Module], objects: dict[str, Any]) -> Iterator[frozenset[int]]:
    """The groups of this rank over which one computation is split: tensor-parallel peers, and stages of a pipeline."""
    data_parallel = _groups_of_fsdp(modules)
    for mesh in _meshes_of_parameters(modules):
        yield from (group for group in _groups_of(mesh) if group not in data_parallel)
    for schedule in filter(is_schedule, objects.values()):
        yield from (frozenset(dist.get_process_group_ranks(stage.group)) for stage in stages_of(schedule))


def _meshes_of_fsdp(modules: dict[str, torch.nn.Module]) -> list[Any]:
    return [
        sharded.mesh_info.mesh
        for module in find_fully_sharded(modules).values()
        for sharded in module._get_fsdp_state()._fsdp_param_groups
    ]


def _meshes_of_parameters(modules: dict[str, torch.nn.Module]) -> list[Any]:
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    found: list[Any] = [parameter for parameter in parameters if is_dtensor(parameter)]
    return list({id(parameter.device_mesh): parameter.device_mesh for parameter in found}.values())


def _groups_of_fsdp(modules: dict[str, torch.nn.Module]) -> set[frozenset[int]]:
    return {group for mesh in _meshes_of_fsdp(modules) for group in _groups_of(mesh)}


def _groups_of(mesh: Any) -> list[frozenset[int]]:
    """This rank's group along each dimension of a mesh."""
    return [frozenset(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]


def _first_of(mesh: Any, data_parallel: set[frozenset[int]]) -> int:
    """The first rank of those that differ from this one only along dimensions that are not data-parallel."""
    index = tuple(
        coordinate if group in data_parallel else slice(None)
        for coordinate, group in zip(mesh.get_coordinate(), _groups_of(mesh), strict=True)
    )
    return int(mesh.mesh[index].min())
