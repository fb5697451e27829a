"""Which ranks compute one thing together, on the same data: they have to draw the same random numbers.

Under tensor parallelism each rank computes a part of every layer. What is drawn for activations that all of them hold,
such as the mask of a dropout, must be the same on all, or their copies drift apart. Data-parallel ranks draw other
numbers, and so do pipeline stages: the layers of each are its own. Megatron's and torchtitan's seeds follow the same
rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from keepstep.weights.memory.blocks import is_dtensor
from keepstep.worker.parallel.fsdp2 import find_fully_sharded


def first_tensor_peer(modules: dict[str, torch.nn.Module]) -> int | None:
    """The first of the ranks that share the computation of DTensors with this one; None where no parameter is one.

    A mesh dimension of a DTensor over which FSDP2 shards or replicates is data-parallel; every other one is not.

    Args:
        modules: the protected ones, by name.
    """
    data_parallel = {
        frozenset(dist.get_process_group_ranks(group))
        for module in find_fully_sharded(modules).values()
        for sharded in module._get_fsdp_state()._fsdp_param_groups
        for group in sharded.mesh_info.mesh.get_all_groups()
    }
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    found: list[Any] = [parameter for parameter in parameters if is_dtensor(parameter)]
    meshes = {id(parameter.device_mesh): parameter.device_mesh for parameter in found}
    first = [_first_of(mesh, data_parallel) for mesh in meshes.values()]
    return min(first, default=None)


def _first_of(mesh: Any, data_parallel: set[frozenset[int]]) -> int:
    """The first rank among those that differ from this one in other dimensions than the data-parallel ones."""
    groups = [frozenset(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]
    index = tuple(
        coordinate if group in data_parallel else slice(None)
        for coordinate, group in zip(mesh.get_coordinate(), groups, strict=True)
    )
    return int(mesh.mesh[index].min())
