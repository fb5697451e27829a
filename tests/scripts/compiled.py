"""A compiled model, which a spare compiles before it is needed; argv: "eager", "compiled" or "warm"."""

import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

torch.set_num_threads(1)
HOW = sys.argv[1]
session = keepstep.init(seed=0)
layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(64, 1)))
compiled = model if HOW == "eager" else torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return compiled(x).square().mean()


def warm_up() -> None:
    loss_of(torch.randn(16, 64)).backward()
    print(f"warm, with rank {os.environ.get('RANK', 'none')}", flush=True)


if HOW == "warm":
    session.warm_up(warm_up)
for step in session.steps(20):
    with step:
        loss_of(torch.randn(16, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
