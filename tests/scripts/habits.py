"""Lines that scripts have in places where keepstep was not expecting them: around a step, and behind its update."""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--in-front", action="store_true", help="the scheduler steps in front of the with")
parser.add_argument("--behind", action="store_true", help="the scheduler steps behind the with")
arguments = parser.parse_args()

session = keepstep.init(seed=3)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)

for step in session.steps(arguments.steps):
    if arguments.in_front and step.index > 0:
        scheduler.step()
    with step:
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if arguments.behind:
        scheduler.step()
