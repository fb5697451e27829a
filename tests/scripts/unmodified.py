"""A script in nanoGPT's style, written for torchrun: reads its rank at import, makes its own process group."""

import os
import signal
import sys

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
assert local_rank < int(os.environ["LOCAL_WORLD_SIZE"])
ending = sys.argv[1] if len(sys.argv) > 1 else "well"

dist.init_process_group("gloo")  # env://
torch.manual_seed(1337 + rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 4 and rank == 1:
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "exit":
            sys.exit(3)
    if ending != "well" and step == 4:
        signal.pause()  # as a rank that never notices that another one is gone
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"rank {rank} of {world_size} through", flush=True)
dist.destroy_process_group()
