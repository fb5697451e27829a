"""A job of three ranks whose ranks wait for each other in a way that its first argument names."""

import sys
import threading
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

HOW = sys.argv[1]
AT = 4
"""The step behind which, or in which, it happens."""

session = keepstep.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
pair = dist.new_group([0, 1])


def disagree() -> None:
    """Ranks 0 and 2 are in one collective, and rank 1 in another."""
    if session.rank == 1:
        dist.barrier(pair)
    else:
        dist.all_gather([torch.zeros(1) for _ in range(3)], torch.zeros(1))


def wait_for_file() -> None:
    while not Path(sys.argv[2]).exists():
        threading.Event().wait(0.05)


num_steps = 10 if HOW != "unevenly" or session.rank == 0 else 12
for step in session.steps(num_steps):
    is_there = step.index == AT and session.generation == 1
    if is_there and HOW == "disagree":
        disagree()
    if is_there and HOW == "evaluate" and session.rank == 0:
        wait_for_file()
    if step.index == AT and HOW == "leave" and session.rank == 0:
        break
    with step:
        if is_there and HOW == "disagree in a step":
            disagree()
        if is_there and HOW == "hang beside a recv" and session.rank == 0:
            posted = dist.irecv(torch.zeros(1), 1)  # of a message that never comes
            threading.Event().wait()
        threading.Event().wait(0.06)  # longer than from one look of the agent to the next
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if HOW == "leave" and session.rank == 0:
    dist.barrier(pair)
print(f"rank {session.rank} is through", flush=True)
