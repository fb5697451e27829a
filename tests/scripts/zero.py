"""A small DDP model trained by ZeroRedundancyOptimizer: each rank holds the optimizer state of its own parameters.

Usage: keepstep run --nproc-per-node 4 tests/scripts/zero.py [--steps N] [--snapshot-every N] [--buckets] [--group N]
    [--checkpoint-dir DIR]
"""

import argparse
import hashlib
import warnings

import torch
from torch import distributed as dist
from torch import nn

import keepstep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what importing it compiles
    from torch.distributed.optim import ZeroRedundancyOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--snapshot-every", default="auto")
parser.add_argument("--buckets", action="store_true", help="parameters are views of buckets")
parser.add_argument("--group", type=int, default=0, help="ranks that share the optimizer state; 0: all")
parser.add_argument("--checkpoint-dir")
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=3)
model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 1))
ddp = nn.parallel.DistributedDataParallel(model)
size = arguments.group or session.world_size
groups = [dist.new_group(range(first, first + size)) for first in range(0, session.world_size, size)]
optimizer = ZeroRedundancyOptimizer(
    ddp.parameters(),
    torch.optim.AdamW,
    groups[session.rank // size],
    parameters_as_bucket_view=arguments.buckets,
    lr=0.01,
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
every = int(arguments.snapshot_every) if arguments.snapshot_every.isdecimal() else arguments.snapshot_every
where = arguments.checkpoint_dir
session.protect(
    model=ddp,
    optimizer=optimizer,
    schedule=schedule,
    snapshot_every=every,
    checkpoint_dir=where,
    checkpoint_every=3,
)
for step in session.steps(arguments.steps):
    with step:
        x = torch.randn(16, 8)
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
if session.is_main:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(digest.hexdigest(), flush=True)
