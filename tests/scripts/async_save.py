"""Saves with torch's `async_save`, over a group of its own, while it trains; a rank may be lost in between."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import keepstep

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
session = keepstep.init(seed=3)
group = torch.distributed.new_group()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(20):
    with step:
        if step.index == kill_at and session.generation == 1 and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.committed and step.index in (5, 15):
        state = {name: value.clone() for name, value in model.module.state_dict().items()}
        saving = dcp.async_save(state, checkpoint_id=folder / str(step.index), process_group=group)
        saving.result(timeout=60)
        if session.rank == 0:
            torch.save(state, folder / f"{step.index}.pt")
if session.rank == 0:
    for index in (5, 15):
        expected = torch.load(folder / f"{index}.pt")
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(loaded, checkpoint_id=folder / str(index), no_dist=True)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    print("both are whole", flush=True)
