"""Writes its own checkpoints with torch's DCP, and loads the newest one where it starts."""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--sharded", action="store_true")
parser.add_argument("--by-itself", action="store_true", help="load without session.resume()")
parser.add_argument("--kill-all-at", type=int, help="every rank kills itself in this step, when it comes first")
parser.add_argument("--kill-at", type=int, help="rank 1 kills itself in this step, when it comes first")
parser.add_argument("--apart", action="store_true", help="rank 1 says that it has found nothing")
parser.add_argument("--new-group", action="store_true", help="load() creates a process group")
parser.add_argument("--start", type=int, help="what the loop is told beside")
arguments = parser.parse_args()

session = keepstep.init(seed=0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = fully_shard(model) if arguments.sharded else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())


def content() -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load() -> int:
    print(f"rank {session.rank} loads", flush=True)
    if arguments.new_group:
        torch.distributed.new_group()
    saved = sorted(arguments.folder.glob("step-*"))
    if not saved:
        return 0
    found = content()
    dcp.load(found, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return 0 if arguments.apart and session.rank == 1 else int(saved[-1].name.removeprefix("step-"))


start = load() if arguments.by_itself else session.resume(load)
session.protect(model=model, optimizer=optimizer)
loop = session.steps(arguments.steps, start=start if arguments.by_itself else arguments.start or 0)
first = None
for step in loop:
    first = step.index if first is None else first
    if step.index and step.index % 5 == 0:
        dcp.save(content(), checkpoint_id=arguments.folder / f"step-{step.index:06d}")
    with step:
        if session.generation == 1 and step.index == arguments.kill_all_at:
            torch.distributed.barrier()  # all have saved
            os.kill(os.getpid(), signal.SIGKILL)
        if session.generation == 1 and session.rank == 1 and step.index == arguments.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
parts = [each.to_local() if arguments.sharded else each for each in model.parameters()]
print(
    f"rank {session.rank} resumed at {start}, began at {first}, has {sum(map(torch.sum, parts)).item()!r}", flush=True
)
