"""A job for benchmarks/turns.py: each rank records the cost of every step.

    keepstep run --nproc-per-node N benchmarks/train_watched.py FOLDER [IDLE_MS [BATCH]]

In each step the host waits for IDLE_MS (default: 0), as it does while its device computes. The batch has BATCH rows
(default: 256). A record is four int64: when the step ended (monotonic), the training thread's processor time so far,
and how long it was runnable but had no core (both from /proc/PID/task/TID/schedstat), in nanoseconds; and 0.
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

idle_s = float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0
session = keepstep.init(seed=0)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
session.protect(model=model, optimizer=optimizer)
features = torch.randn(int(sys.argv[3]) if len(sys.argv) > 3 else 256, 512)

with (
    open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", buffering=0) as schedstat,
    open(Path(sys.argv[1]) / f"steps-{session.rank}", "wb", buffering=0) as file,
):
    for step in session.steps(1 << 40):
        with step:
            model(features).square().mean().backward()
            if idle_s:
                threading.Event().wait(idle_s)
            optimizer.step()
            optimizer.zero_grad()
        ran_ns, waited_ns, _ = map(int, os.pread(schedstat.fileno(), 64, 0).split())
        file.write(struct.pack("<4q", time.monotonic_ns(), ran_ns, waited_ns, 0))
