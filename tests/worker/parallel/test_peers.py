"""Who draws the same random numbers, and who reads the same samples: ranks that share a computation, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, meet, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.worker.parallel.peers import data_ranks, first_tensor_peer, ranks_of_mesh


def built(layout: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    match layout:
        case "plain":
            return model
        case "ddp":
            return DistributedDataParallel(model)
        case "ddp over two":
            return DistributedDataParallel(model, process_group=mesh.get_group("inner"))
        case "fsdp2":
            return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        case "fsdp2 over two meshes":
            fully_shard(model[0], mesh=mesh["inner"])
            fully_shard(model[1], mesh=mesh["outer"])
            return model
        case "hsdp":
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


def pipelined(num_stages: int, layout: str) -> dict[str, Any]:
    """The last dimension of the mesh has the stages, the first one the data."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    names = ("data", "middle", "stages")
    mesh = init_device_mesh("cpu", (8 // num_stages // 2, 2, num_stages), mesh_dim_names=names)
    module: nn.Module = nn.Sequential(nn.Linear(8, 8))
    match layout:
        case "ddp":
            module = DistributedDataParallel(module, process_group=mesh["data", "middle"]._flatten().get_group())
        case "fsdp2":
            fully_shard(module, mesh=mesh["data", "middle"])
        case "fsdp2 x tp":
            parallelize_module(module, mesh["middle"], {"0": ColwiseParallel()})
            fully_shard(module, mesh=mesh["data"])
        case "middle only":
            fully_shard(module, mesh=mesh["middle"])
    position = mesh.get_local_rank("stages")
    stage = pipelining.PipelineStage(module, position, num_stages, torch.device("cpu"), group=mesh.get_group("stages"))
    return {"model": module, "schedule": pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)}


def data_ranks_of(rank: int, size: int, path: Path, layout: str, shard: str) -> Any:
    join(path, rank, size)
    torch.manual_seed(0)
    is_pipeline = layout.startswith("pp")
    objects = pipelined(int(layout[3]), layout.partition(" x ")[2]) if is_pipeline else {"model": built(layout)}
    found = data_ranks(objects, shard)
    meet(path, size, "through")
    return found and list(found)


@pytest.mark.parametrize(
    ("layout", "shard", "ranks"),
    [
        ("plain", "", [[0, 1, 2, 3]] * 4),
        ("plain", "expert 1", [None] * 4),
        ("ddp", "", [[0, 1, 2, 3]] * 4),
        ("ddp over two", "", [None] * 4),
        ("fsdp2", "", [[0, 1, 2, 3]] * 4),
        ("hsdp", "", [[0, 1, 2, 3]] * 4),
        ("fsdp2 over two meshes", "", [None] * 4),
        ("fsdp2 x tp", "", [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ("tp", "", [None] * 4),
        ("pp 2 x ddp", "", [[0, 2, 4, 6], [1, 3, 5, 7]] * 4),
        ("pp 2 x fsdp2", "", [[0, 2, 4, 6], [1, 3, 5, 7]] * 4),
        ("pp 2 x fsdp2 x tp", "", [[0, 4], [1, 5], [2, 6], [3, 7]] * 2),
        ("pp 4 x middle only", "", [[0, 4], [1, 5], [2, 6], [3, 7]] * 2),
        ("pp 2 x middle only", "", [None] * 8),
        ("pp 2 x nothing", "", [None] * 8),
    ],
)
def test_who_has_samples_of_their_own(layout: str, shard: str, ranks: list[list[int] | None], tmp_path: Path) -> None:
    assert run_ranks(len(ranks), data_ranks_of, tmp_path, layout, shard) == ranks


def over_all(rank: int, size: int, path: Path) -> Any:
    """Of a model that all ranks compute together; and what a mesh says, or is refused for."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    join(path, rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    split = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (4,)), ColwiseParallel())
    stage = pipelining.PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    errors = []
    three = DeviceMesh("cpu", [0, 1, 2])
    for wrong in ("data", three):
        with pytest.raises(ConfigurationError) as error:
            ranks_of_mesh(wrong)
        errors.append(str(error.value))
    found = [data_ranks(each, "") for each in ({"model": split}, {"model": stage.submod, "schedule": schedule})]
    return found, [list(ranks_of_mesh(part)) for part in (mesh["outer"], mesh["inner"], mesh)], errors


def test_all_ranks_work_on_the_same_samples(tmp_path: Path) -> None:
    found = run_ranks(4, over_all, tmp_path)
    assert [alone for alone, _meshes, _errors in found] == [[(rank,)] * 2 for rank in range(4)]
    assert found[3][1] == [[1, 3], [2, 3], [0, 1, 2, 3]]
    for rank, (_alone, _meshes, (no_mesh, three)) in enumerate(found):
        assert "protect(data_mesh='data'): give a DeviceMesh" in no_mesh
        assert f"a mesh of ranks [0, 1, 2], on rank {rank} of 4" in three
