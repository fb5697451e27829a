"""The smallest job: steps, then a line from each rank. Flags choose what else happens."""

import argparse
import os
import signal
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.0, help="how much longer each step takes")
parser.add_argument("--kill-all-at", type=int, help="every rank kills itself in this step of generation 1")
parser.add_argument("--kill-at", type=int, help="rank 0 kills itself in this step, whenever it comes")
parser.add_argument("--meet-at", type=int, help="the ranks wait for each other in this step, before they compute")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--fail-after-steps", action="store_true", help="rank 1 raises after the last step")
parser.add_argument("--average-after-update", action="store_true", help="a collective in the update")
parser.add_argument("--stop-early-at", type=int, help="leave the loop after this step")
arguments = parser.parse_args()

session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer, checkpoint_dir=arguments.checkpoint_dir, checkpoint_every=5)

first = None
for step in session.steps(arguments.steps):
    first = step.index if first is None else first
    with step:
        if session.generation == 1 and step.index == arguments.kill_all_at:
            session._recovery.flush()  # waits for the checkpoint that is being written
            torch.distributed.barrier()  # all are in this step; if one dies early the barrier echoes, and the next dies
            os.kill(os.getpid(), signal.SIGKILL)
        if session.rank == 0 and step.index == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.index == arguments.meet_at:
            torch.distributed.barrier()
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        model(data).pow(2).mean().backward()
        threading.Event().wait(arguments.step_s)
        optimizer.step()
        if arguments.average_after_update:
            torch.distributed.all_reduce(torch.ones(1))
        optimizer.zero_grad()
    if step.committed and step.index == arguments.stop_early_at:
        break
if arguments.fail_after_steps and session.rank == 1:
    raise RuntimeError("failed after the last step")
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"rank {session.rank} of {session.world_size} began at {first}, sum {total!r}", flush=True)
