"""What torchrun's variables say at the end of a job in which a rank was lost; a line of JSON from each rank."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "GROUP_RANK", "MASTER_ADDR")
num_lost = int(sys.argv[1])

session = keepstep.init()
if session.once("log"):
    Path("log.txt").write_text("begun\n")
with session.once("data") as mine:
    if mine:
        with Path("data.txt").open("a") as file:
            file.write("fetched\n")
own_id = session.agree("run", os.getpid())
is_main_at_start = session.is_main
at_start = os.environ.get("LOCAL_RANK")
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(session.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
for step in session.steps(8):
    with step:
        assert session.is_main == (session.rank == 0)
        if session.generation == 1 and session.rank == num_lost and step.index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if session.is_main:
            with Path("log.txt").open("a") as file:
                file.write(f"step {step.index}\n")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
found = {name: os.environ[name] for name in NAMES}
found |= {"session": [session.rank, session.local_rank, str(session.device)], "at_start": at_start}
found |= {"is_main_at_start": is_main_at_start, "run": own_id, "run_again": session.agree("run", 0)}
found |= {"has_port": 0 < int(os.environ["MASTER_PORT"]) < 65536}
print(json.dumps(found), flush=True)
