"""A small job whose steps take as long as it is told, and whose ranks say what their weights are at the end."""

import hashlib
import sys
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

num_steps, step_s = int(sys.argv[1]), float(sys.argv[2])
session = keepstep.init(seed=0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer)

for step in session.steps(num_steps):
    with step:
        model(torch.randn(32, 64)).square().mean().backward()
        threading.Event().wait(step_s)  # a host is idle while its device computes
        optimizer.step()
        optimizer.zero_grad()

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print("digest", session.rank, digest.hexdigest(), flush=True)
