"""A GAN: two models, each with an optimizer of its own, and one update a step."""

import argparse
import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument(
    "--detach", action="store_true", help="a forward with gradients and no backward, then two backwards"
)
arguments = parser.parse_args()

session = keepstep.init(seed=2)
judge = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
maker = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3)
session.protect(judge=judge, maker=maker, judge_optimizer=judge_optimizer, maker_optimizer=maker_optimizer)
loss = torch.nn.BCEWithLogitsLoss()
real, false = torch.ones(16, 1), torch.zeros(16, 1)

for step in session.steps(arguments.steps):
    with step:
        if step.index % 2 == 0:
            with (
                contextlib.nullcontext() if arguments.detach else torch.no_grad()
            ):  # changes the maker's BatchNorm, on each rank in its own way
                made = maker(torch.randn(16, 4))
            loss(judge(torch.randn(16, 8) + 1), real).backward()
            loss(judge(made.detach()), false).backward()
            judge_optimizer.step()
        else:
            if arguments.detach:
                with maker.no_sync():
                    loss(judge.module(maker(torch.randn(16, 4))), real).backward()
            loss(judge(maker(torch.randn(16, 4))), real).backward()
            maker_optimizer.step()
        judge.zero_grad()
        maker.zero_grad()
