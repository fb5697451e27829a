"""FSDP2 on two ranks, one of which damages its snapshots in a step, as broken memory would.

Usage: keepstep run --nproc-per-node 2 tests/scripts/damaged.py [--steps N] [--damaged-at N] [--checkpoint-dir DIR]
"""

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--damaged-at", type=int, default=10)
parser.add_argument("--checkpoint-dir")
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=0)
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
session.protect(
    model=model, optimizer=optimizer, snapshot_every=1, checkpoint_dir=arguments.checkpoint_dir, checkpoint_every=3
)


def damage(*_: object) -> None:
    """Behind the gradient barrier, where the step's snapshot is complete."""
    if step.index == arguments.damaged_at and session.rank == 1 and session.generation == 1:
        file = session._recovery._snapshots._file
        for found in file.whole:
            file._maps[found.slot][found.num_bytes // 2] ^= 1


optimizer.register_step_pre_hook(damage)
for step in session.steps(arguments.steps):
    with step:
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
