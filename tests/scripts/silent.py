"""A job of two ranks that are silent in a way that its first argument names: `silent.py HOW SECONDS [FOLDER]`."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

HOW, SECONDS = sys.argv[1], float(sys.argv[2])
AT = 20
"""The step in which it happens: the first phases of the ranks are over."""

session = keepstep.init(seed=0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer)
has_read = False


def pause() -> None:
    threading.Event().wait(SECONDS)


def batch() -> torch.Tensor:
    """The first one of each process takes long: it opens files and imports modules."""
    global has_read
    if HOW == "lazy" and not has_read:
        pause()
    has_read = True
    return torch.ones(2, 4)


for step in session.steps(60):
    is_there = step.index == AT and session.generation == 1
    with step:
        if is_there and HOW == "all pause":
            pause()
        if is_there and HOW == "hang" and session.rank == 1:
            threading.Event().wait()
        if is_there and HOW == "stopped":
            Path(sys.argv[3], f"{session.rank}-at-{os.getpid()}").touch()
            while not Path(sys.argv[3], "go on").exists():
                threading.Event().wait(0.01)
        threading.Event().wait(0.01)
        if HOW == "prints" and session.rank == 0:
            print("x" * 4000)
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_there and HOW == "save" and session.rank == 0:
            pause()
    if is_there and HOW == "lazy" and session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {session.rank} is through", flush=True)
