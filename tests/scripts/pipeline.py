"""A pipeline of two stages, and as many replicas of it as there are pairs of ranks.

Usage: keepstep run --nproc-per-node 4 tests/scripts/pipeline.py [--steps N] [--schedule NAME] [--checkpoint-dir DIR]
"""

import argparse

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--checkpoint-dir")
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=3)
WIDTH, MICROBATCHES = 16, 4
kind = pipelining.schedules.get_schedule_class(arguments.schedule)
stages_per_rank = 1 if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else 2


def layers() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.BatchNorm1d(24), nn.Linear(24, WIDTH))


mesh = init_device_mesh("cpu", (session.world_size // 2, 2), mesh_dim_names=("data", "pipeline"))
position = mesh.get_local_rank("pipeline")
modules, stages = nn.ModuleDict(), []
for number in range(position, 2 * stages_per_rank, 2):
    torch.manual_seed(number)
    part = DistributedDataParallel(layers(), process_group=mesh.get_group("data"))
    modules[f"stage{number}"] = part
    group = mesh.get_group("pipeline")
    stages.append(pipelining.PipelineStage(part, number, 2 * stages_per_rank, torch.device("cpu"), group=group))
schedule = kind(stages[0] if stages_per_rank == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(modules.parameters(), lr=0.01)
session.protect(
    model=modules,
    optimizer=optimizer,
    schedule=schedule,
    checkpoint_dir=arguments.checkpoint_dir,
    checkpoint_every=3,
)
for step in session.steps(arguments.steps):
    with step:
        generator = torch.Generator().manual_seed(1000 * step.index + session.data_rank)
        batch, target = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        schedule.step(*([batch] if position == 0 else []), **({"target": target} if stages[-1].is_last else {}))
        optimizer.step()
if arguments.checkpoint_dir is not None:
    assert session._state is not None
    print("holds", session._state.digest(), flush=True)
if session.is_main:
    print("done", flush=True)
