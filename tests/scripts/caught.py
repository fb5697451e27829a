"""Provokes errors of its own calls in every step, and goes on: a reduction that gloo has not, and once a group's own
timeout."""

import os
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

STEPS = 40
LATE = 36
"""In this step rank 1 does not come to a barrier of rank 0's, whose group has a short timeout of its own."""

session = keepstep.init(seed=2)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
caught = session.state(in_front=0, in_step=0, timeouts=0)
session.protect(model=model, optimizer=optimizer)
pair = dist.new_group([0, 1], timeout=timedelta(milliseconds=200))
errors_behind = 0


def reduce_in_vain(way: str) -> int:
    """How many errors of the call were raised; in the end the tensor is as it was."""
    tensor = torch.full((3,), float(session.rank))
    try:
        if way == "at once":
            dist.all_reduce(tensor, op=dist.ReduceOp.BAND)
        else:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.BAND, async_op=True)
            work.wait() if way == "later" else work.get_future().wait()
    except RuntimeError as error:
        return int("Cannot use ReduceOp.BAND" in str(error))
    return 0


def meet_in_vain() -> int:
    """Rank 0's error, which it tells to the others; rank 1 stays away until then."""
    found = torch.zeros(1)
    if session.rank == 0:
        try:
            dist.barrier(pair)
        except RuntimeError as error:
            found += "Timed out waiting 200ms" in str(error)
    dist.broadcast(found, 0)
    return int(found)


for step in session.steps(STEPS):
    caught.in_front += reduce_in_vain("at once")
    with step:
        factor = 1 + reduce_in_vain("later") + reduce_in_vain("by its future")
        if step.index == LATE:
            caught.timeouts += meet_in_vain()
        loss = (model(torch.randn(4, 8)) * factor).square().mean()
        loss.backward()
        caught.in_step += reduce_in_vain("at once")
        optimizer.step()
        errors_behind += reduce_in_vain("later")
        optimizer.zero_grad()
    errors_behind += reduce_in_vain("by its future")
assert (caught.in_front, caught.in_step, caught.timeouts) == (STEPS, STEPS, 1), caught
if "RANK" in os.environ and session.generation == 1:
    assert errors_behind == 2 * STEPS
