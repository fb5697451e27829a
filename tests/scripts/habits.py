"""Lines that scripts have in places where keepstep was not expecting them: around a step, and after its update."""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--in-front", action="store_true", help="the scheduler steps before the with")
parser.add_argument("--behind", action="store_true", help="the scheduler steps after the with")
parser.add_argument("--reduce", choices=["update", "behind"], help="reduce the loss for a log line there")
parser.add_argument("--plateau", action="store_true", help="give the reduced loss to a scheduler")
arguments = parser.parse_args()

session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, plateau=plateau)


def log(loss: torch.Tensor) -> None:
    """What every second script does at the end of a step."""
    torch.distributed.all_reduce(loss)
    mean = loss.item() / session.world_size
    if session.rank == 0:
        print(f"step {step.index}  loss {mean:.4f}")
    if arguments.plateau:
        plateau.step(mean)


for step in session.steps(arguments.steps):
    if arguments.in_front and step.index > 0:
        scheduler.step()
    with step:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.reduce == "update":
            log(loss.detach())
            scheduler.step()
    if arguments.reduce == "behind" and step.committed:
        log(loss.detach())
    if arguments.behind:
        scheduler.step()
