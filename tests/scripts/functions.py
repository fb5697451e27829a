"""FSDP2, whose lost shards come back from snapshots: functions are called again in steps that lie behind.

Usage: keepstep run --nproc-per-node 4 tests/scripts/functions.py [--snapshot-every N]
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--snapshot-every", type=int, default=3)
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=0)
mesh = init_device_mesh("cpu", (session.world_size,))
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer, snapshot_every=arguments.snapshot_every)


@session.step
def train_step(batch: dict[str, torch.Tensor]) -> float:
    x = batch.pop("x")  # a function that is called again must find it
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


for step in session.steps(40):
    generator = torch.Generator().manual_seed(1000 * step.index + session.rank)
    loss = train_step({"x": torch.randn(8, 8, generator=generator)})
    session.defer(print, f"step {step.index} of rank {session.rank}: {loss:.6f}", flush=True)
