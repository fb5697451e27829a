"""Evaluates in the middle of its steps, which switches dropout off, and freezes layers for good at some step."""

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

STEPS = 45
FREEZE_AT = 15

session = keepstep.init(seed=6)
first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
net = torch.nn.Sequential(first, torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    total = torch.zeros(1)
    for _ in range(2):
        loss = model(torch.randn(4, 8)).square().mean().reshape(1)
        dist.all_reduce(loss)
        total += loss
    model.train()
    return total.item() / session.world_size


for step in session.steps(STEPS):
    if step.index == FREEZE_AT:
        first.requires_grad_(False)
    with step:
        if step.index > FREEZE_AT:
            first.eval()
        scale = 1 + evaluate()
        (model(torch.randn(4, 8)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
