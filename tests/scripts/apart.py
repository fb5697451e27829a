"""Trains a model whose ranks part ways without telling keepstep.

Prints the sum of the weights at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--hidden", action="store_true", help="the optimizer's state_dict() lacks its count of updates")
parser.add_argument("--apart-at", type=int, help="one rank writes to a parameter of its own in this step")
parser.add_argument("--wrong-load", type=int, default=0, help="a replacement is wrong after so many loads")
parser.add_argument("--skip-at", type=int, help="rank 1 skips the update of this step")
parser.add_argument("--kill-at", type=int, default=20, help="rank 1 is killed in this step's forward")
arguments = parser.parse_args()


class Counting(torch.optim.SGD):
    """Its rate falls with the number of updates, which is in no ``state_dict()``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.num_updates = 0

    def step(self, closure: Any = None) -> None:
        """Makes an update."""
        self.num_updates += arguments.hidden
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 / (1 + self.num_updates) * parameter.grad


session = keepstep.init(seed=0)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = Counting(model.parameters())
session.protect(model=model, optimizer=optimizer)
num_wrong = 0
is_replacement = None
for step in session.steps(arguments.steps):
    is_replacement = step.index > 0 if is_replacement is None else is_replacement
    if step.resumed and is_replacement and num_wrong < arguments.wrong_load:
        num_wrong += 1
        with torch.no_grad():
            model.module.weight[0, 0] += 1
    with step:
        if step.index == arguments.kill_at and session.rank == 1 and session.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.index == arguments.apart_at and session.rank == 2:
            model.module.bias.data += 1
        model(torch.randn(4, 8)).square().mean().backward()
        if step.index != arguments.skip_at or session.rank != 1:
            optimizer.step()
        optimizer.zero_grad()
print(f"rank {session.rank}: {model.module.weight.double().sum().item():.17g}", flush=True)
