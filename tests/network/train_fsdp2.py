"""A small job under FSDP2, in which no rank holds what another one does, and whose ranks say what they hold at the end.

Usage: train_fsdp2.py STEPS SECONDS_OF_A_STEP SNAPSHOT_EVERY [NODE]

The first times that a rank of that node is to keep a second copy of a snapshot it finds no memory for it.
"""

import hashlib
import os
import sys
import threading

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import keepstep
from keepstep.worker.step import second_copies

num_steps, step_s, snapshot_every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if sys.argv[4:] == [os.environ["GROUP_RANK"]]:
    left = [0] * 3
    free_bytes = second_copies.free_bytes
    second_copies.free_bytes = lambda: left.pop() if left else free_bytes()
torch.set_num_threads(1)
session = keepstep.init(seed=0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (session.world_size,)))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model=model, optimizer=optimizer, snapshot_every=snapshot_every)

for step in session.steps(num_steps):
    with step:
        model(torch.randn(32, 64)).square().mean().backward()
        threading.Event().wait(step_s)  # a host is idle while its device computes
        optimizer.step()
        optimizer.zero_grad()

digest = hashlib.sha256()
for parameter in model.parameters():
    assert isinstance(parameter, DTensor)
    digest.update(parameter.to_local().detach().numpy().tobytes())
print("digest", session.rank, digest.hexdigest(), flush=True)
