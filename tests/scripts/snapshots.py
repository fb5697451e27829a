"""Replicas that take snapshots all the same; a spare builds all of its model before it is given a rank."""

import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

torch.set_num_threads(1)
session = keepstep.init(seed=0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer, snapshot_every=1)
for step in session.steps(12):
    with step:
        loss = model(torch.randn(32, 64)).square().mean()
        threading.Event().wait(0.1)  # meanwhile the copy of the state is complete
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
