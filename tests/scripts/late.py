"""Rank 1 comes too late to a barrier of a group with a short timeout; argv: where ("in a step", "outside") and a file.

Rank 0 writes the error that it gets to the file, and rank 1 goes on when it is there.
"""

import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

WHERE, TOLD = sys.argv[1], Path(sys.argv[2])
AT = 3

session = keepstep.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
pair = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))


def meet_in_vain() -> None:
    if session.rank == 1:
        while not TOLD.exists():
            threading.Event().wait(0.05)
        return
    error = "none"
    try:
        dist.barrier(pair)
    except RuntimeError as raised:
        error = str(raised)
    TOLD.with_suffix(".new").write_text(error, encoding="utf-8")
    TOLD.with_suffix(".new").rename(TOLD)


for step in session.steps(6):
    if WHERE == "outside" and step.index == AT and session.generation == 1:
        meet_in_vain()
    with step:
        if WHERE == "in a step" and step.index == AT and session.generation == 1:
            meet_in_vain()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {session.rank} is through", flush=True)
