"""A small job whose steps take as long as it is told, and whose ranks say what their weights are at the end.

With a third argument they wait between two steps in the middle until there is a file of that name, and say so first by
files of their own.
"""

import hashlib
import sys
import threading
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

num_steps, step_s = int(sys.argv[1]), float(sys.argv[2])
gate = Path(sys.argv[3]) if len(sys.argv) > 3 else None
session = keepstep.init(seed=0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer)

for step in session.steps(num_steps):
    if gate is not None and step.index >= num_steps // 2:
        gate.with_name(f"{gate.name}.{session.rank}").touch()
        while not gate.exists():
            threading.Event().wait(0.05)
    with step:
        model(torch.randn(32, 64)).square().mean().backward()
        threading.Event().wait(step_s)  # a host is idle while its device computes
        optimizer.step()
        optimizer.zero_grad()

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print("digest", session.rank, digest.hexdigest(), flush=True)
