"""Who draws the same random numbers: ranks that share a computation, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, meet, run_ranks
from torch import nn

from keepstep.worker.parallel.peers import first_tensor_peer


def built(layout: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if layout == "ddp":
        return model
    if layout == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "hsdp":
        return fully_shard(model, mesh=mesh)
    tensor, data = ("inner", "outer") if layout in ("tp", "fsdp2 x tp") else ("outer", "inner")
    parallelize_module(model[0], mesh[tensor], ColwiseParallel())
    return fully_shard(model, mesh=mesh[data]) if layout.startswith("fsdp2") else model


def first_peers(rank: int, size: int, path: Path, layout: str) -> Any:
    join(path, rank, size)
    torch.manual_seed(0)
    first = first_tensor_peer({"model": built(layout)})
    meet(path, size, "through")
    return first


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("ddp", [None] * 4),
        ("fsdp2", [0, 1, 2, 3]),
        ("hsdp", [0, 1, 2, 3]),
        ("tp", [0, 0, 2, 2]),
        ("tp outside", [0, 1, 0, 1]),
        ("fsdp2 x tp", [0, 0, 2, 2]),
    ],
)
def test_who_draws_with_whom(layout: str, first: list[int | None], tmp_path: Path) -> None:
    assert run_ranks(4, first_peers, tmp_path, layout) == first
