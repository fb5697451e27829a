"""Reads its rank while it starts, as scripts written for torchrun do, and calls `keepstep.init()` afterwards."""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
assert int(os.environ["LOCAL_WORLD_SIZE"]) > LOCAL_RANK
assert "colorsys" in sys.modules, "what --preload names is there before the script's first line"

import keepstep  # noqa: E402 - after the script has read its rank

session = keepstep.init(seed=3)
assert (session.rank, session.local_rank, session.world_size) == (RANK, LOCAL_RANK, WORLD_SIZE)
torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(int(sys.argv[1])):
    with step:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + RANK))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
