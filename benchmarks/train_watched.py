"""A job for benchmarks/dashboard.py: each rank writes down what every step cost it.

    keepstep run --nproc-per-node N benchmarks/train_watched.py FOLDER

A record is four int64: when the step ended (monotonic), the processor time that the training thread has had so far, and
for how long it could have run but had no core (both from /proc/PID/task/TID/schedstat), in nanoseconds; and 0.
"""

import os
import struct
import sys
import threading
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

session = keepstep.init(seed=0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
session.protect(model=model, optimizer=optimizer)
features = torch.randn(256, 512)

with (
    open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", buffering=0) as schedstat,
    open(Path(sys.argv[1]) / f"steps-{session.rank}", "wb", buffering=0) as file,
):
    for step in session.steps(1 << 40):
        with step:
            model(features).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ran_ns, waited_ns, _ = map(int, os.pread(schedstat.fileno(), 64, 0).split())
        file.write(struct.pack("<4q", time.monotonic_ns(), ran_ns, waited_ns, 0))
