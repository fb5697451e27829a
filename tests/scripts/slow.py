"""A job in which rank 1 takes longer than the others: in the forward, or in the backward, where all wait for it."""

import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

BUSY_S = 0.06


def work() -> None:
    """Keeps a core busy, as too much data or a throttled device does."""
    end_s = time.monotonic() + BUSY_S
    while time.monotonic() < end_s:
        pass


where = sys.argv[1]
session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)

for step in session.steps(40):
    with step:
        output = model(torch.randn(4, 8))
        if session.rank == 1 and where == "forward":
            work()
        if session.rank == 1 and where == "backward":
            output.register_hook(lambda _gradient: work())
        output.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
