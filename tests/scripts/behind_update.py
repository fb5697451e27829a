"""DDP with what many scripts do behind the update: gather a sample of each rank, or look at the mean of a loss."""

import argparse

import torch
import torch.distributed as dist

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--look", action="store_true", help="decide by a loss that all ranks have averaged")
arguments = parser.parse_args()

session = keepstep.init(seed=0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
session.protect(model=model, optimizer=optimizer)

for step in session.steps(arguments.steps):
    with step:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.look:
            mean = loss.detach()
            dist.all_reduce(mean)
            if mean.item() / dist.get_world_size() > 1e6:
                raise SystemExit("the loss is too large")
        else:
            samples = [None] * dist.get_world_size()
            dist.all_gather_object(samples, f"a sample of rank {session.rank}, step {step.index}")
            dist.gather_object(len(samples), samples if session.rank == 1 else None, dst=1)
