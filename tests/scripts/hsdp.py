"""A small transformer under HSDP: fully sharded block by block over 2 ranks, and as many replicas as there are ranks.

Usage: keepstep run --nproc-per-node 4 tests/scripts/hsdp.py [--steps N] [--replicas N] [--snapshot-every N] [--muon]
"""

import argparse
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--snapshot-every", default="auto")
parser.add_argument("--muon", action="store_true", help="trains the blocks' matrices by Muon")
arguments = parser.parse_args()

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, which this script does not write to
torch.set_num_threads(1)
session = keepstep.init(seed=3)
WIDTH, VOCABULARY, CONTEXT = 24, 19, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        result: torch.Tensor = x + self.wide(x)
        return result


model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))
sizes = (arguments.replicas, session.world_size // arguments.replicas)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
for block in model:
    if isinstance(block, Block):
        fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
every = int(arguments.snapshot_every) if arguments.snapshot_every.isdecimal() else arguments.snapshot_every
matrices = [p for block in model[1:3] for p in block.parameters() if arguments.muon and p.ndim == 2]
by_adam = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(by_adam, lr=0.01)]
if matrices:
    optimizers.append(torch.optim.Muon(matrices, lr=0.01))
protected = {f"optimizer{number}": optimizer for number, optimizer in enumerate(optimizers)}
session.protect(model=model, snapshot_every=every, **protected)
for step in session.steps(arguments.steps):
    with step:
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
if session.is_main:
    print("done", flush=True)
