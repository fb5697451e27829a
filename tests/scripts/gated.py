"""A small job that waits inside some of its steps until it is let go on, and says what its weights are at the end.

    gated.py FOLDER STEP_S GATE ...

Step GATE waits until FOLDER holds a file of that number. Who waits can be stopped, as in a long forward.
"""

import hashlib
import sys
import threading
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

NUM_STEPS = 40

folder, step_s, gates = Path(sys.argv[1]), float(sys.argv[2]), {int(gate) for gate in sys.argv[3:]}
session = keepstep.init(seed=0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer)
pause = threading.Event()

for step in session.steps(NUM_STEPS):
    with step:
        loss = model(torch.randn(32, 64)).square().mean()
        while step.index in gates and not (folder / str(step.index)).exists():
            pause.wait(0.02)
            with torch.no_grad():
                model.module(torch.zeros(1, 64))
        loss.backward()
        pause.wait(step_s)  # a host is idle while its device computes
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {session.rank} step {step.index}\n", end="", flush=True)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(f"digest {session.rank} {digest.hexdigest()}\n", end="", flush=True)
