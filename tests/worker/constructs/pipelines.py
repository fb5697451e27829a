"""Pipelines, alone and with data-parallel replicas."""

from collections.abc import Callable
from typing import Any

import torch
from tests.worker.constructs.construct import SIZE, WIDTH, Constructs, Ranks, Result, adds_to
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CONSTRUCTS: Constructs = {}
construct = adds_to(CONSTRUCTS)

MICRO_BATCHES = 4
SCHEDULES: dict[str, tuple[type, int]] = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2),
}
"""The class, and how many stages a rank has."""


def stage_numbers(position: int, num_positions: int, name: str) -> list[int]:
    """V-shaped schedules give the first rank the last stage, too."""
    if SCHEDULES[name][1] == 1:
        return [position]
    return [position, 2 * num_positions - 1 - position if "ZBV" in name else position + num_positions]


def layers(number: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), norm(12), nn.GELU(), nn.Linear(12, WIDTH))


def train_pipeline(
    ranks: Ranks,
    name: str,
    mesh: DeviceMesh,
    wrap: Callable[[nn.Module], nn.Module],
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
) -> Result:
    """Trains a pipeline along the mesh's last dimension; the first one, if there are two, is data-parallel."""
    kind, per_rank = SCHEDULES[name]
    group, position = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    data_rank = mesh.get_local_rank("data") if mesh.ndim == 2 else 0
    modules, stages = nn.ModuleDict(), []
    num_positions = mesh.size(mesh.ndim - 1)
    for number in stage_numbers(position, num_positions, name):
        modules[str(number)] = wrap(layers(number, norm))
        stage = pipelining.PipelineStage(
            modules[str(number)], number, num_positions * per_rank, torch.device("cpu"), group=group
        )
        stages.append(stage)
    schedule = kind(stages[0] if per_rank == 1 else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step_of(number: int) -> None:
        batch = ranks.batch(number, data_rank).flatten(
            0, 1
        )  # zero-bubble schedules detach a stage's output, which 3-D is a view
        outcome: dict[str, Any] = {"target": batch.flip(0)} if any(stage.is_last for stage in stages) else {}
        schedule.step(*([batch] if any(stage.is_first for stage in stages) else []), **outcome)

    return ranks.trained(modules, step_of, schedule=schedule)


def add(name: str) -> None:
    """A pipeline over all ranks."""

    @construct(f"pipeline, {name}")
    def alone(ranks: Ranks) -> Result:
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("pipeline",))
        return train_pipeline(ranks, name, mesh, lambda module: module)


def squares() -> DeviceMesh:
    return init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("data", "pipeline"))


def add_replicas(name: str) -> None:
    """Two pipelines, with DDP around each stage."""

    @construct(f"PP × DP 2 × 2, {name}")
    def replicated(ranks: Ranks) -> Result:
        mesh = squares()
        group = mesh.get_group("data")
        return train_pipeline(ranks, name, mesh, lambda module: DistributedDataParallel(module, process_group=group))


def add_shards(name: str) -> None:
    """Two pipelines, with FSDP2 in each stage."""

    @construct(f"PP × FSDP2 2 × 2, {name}")
    def sharded(ranks: Ranks) -> Result:
        mesh = squares()
        return train_pipeline(ranks, name, mesh, lambda module: fully_shard(module, mesh=mesh["data"]), nn.LayerNorm)


for each in SCHEDULES:
    add(each)
for each in ("1F1B", "Interleaved1F1B"):
    add_replicas(each)
for each in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
    add_shards(each)
