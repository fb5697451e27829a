"""Tensor parallelism over two ranks with sequence parallel norms, and as many replicas as there are pairs of ranks.

Usage: keepstep run --nproc-per-node 4 tests/scripts/tensor_parallel.py [--steps N] [--checkpoint-dir DIR]
"""

import argparse

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--checkpoint-dir")
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=3)
WIDTH, LENGTH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 32)
        self.narrow = nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.wide(self.norm(x)))
        return x + self.narrow(hidden)


PLAN = {
    "norm": SequenceParallel(),
    "wide": ColwiseParallel(input_layouts=Shard(1)),
    "narrow": RowwiseParallel(output_layouts=Shard(1)),
}

mesh = init_device_mesh("cpu", (session.world_size // 2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
for number in range(2):
    parallelize_module(model[number], mesh["tensor"], PLAN)
parallelize_module(model[2], mesh["tensor"], ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.protect(
    model=model,
    optimizer=optimizer,
    data_mesh=mesh["data"],
    checkpoint_dir=arguments.checkpoint_dir,
    checkpoint_every=3,
)


def average(gradient: DTensor) -> None:
    """Over the data-parallel ranks."""
    local = gradient.to_local()
    dist.all_reduce(local, group=mesh.get_group("data"))
    local /= mesh.size(0)


for step in session.steps(arguments.steps):
    with step:
        generator = torch.Generator().manual_seed(1000 * step.index + session.data_rank)
        batch = torch.randn(4, LENGTH, WIDTH, generator=generator)
        part = batch.chunk(2, dim=1)[mesh.get_coordinate()[1]]  # sequence parallel: each rank has its part of it
        loss = model(part).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                average(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
if arguments.checkpoint_dir is not None:
    assert session._state is not None
    print("holds", session._state.digest(), flush=True)
if session.is_main:
    print("done", flush=True)
