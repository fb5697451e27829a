"""Nested loops over epochs and batches that sum up losses for a line at the end of each epoch, also as a GAN.

Usage: keepstep run --nproc-per-node 2 tests/scripts/means.py [--updates 2] [--accelerate] [...]
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import keepstep
from keepstep.integrations.accelerate import KeepstepAccelerator

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=1)
parser.add_argument("--accelerate", action="store_true")
parser.add_argument("--one-loop", action="store_true", help="session.batches() in place of epochs()")
parser.add_argument("--by-hand", action="store_true", help="the script itself sets sums to 0 where an epoch begins")
parser.add_argument("--shards", action="store_true", help="FSDP2, so that the job may have to go back")
parser.add_argument("--dies", type=Path, help="rank 1 is killed in the call for its second line, and makes this")
parser.add_argument("--dies-after", type=Path, help="the same in the call after it")
arguments = parser.parse_args()


class Norms:
    """Sums up the norms of batches."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"].clone()


torch.manual_seed(0)
session = keepstep.init(seed=2)
models = torch.nn.ModuleList([torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)])
dataset = TensorDataset(torch.randn(56, 8))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
if arguments.accelerate:
    accelerator = KeepstepAccelerator(cpu=True)
    first, second, loader = accelerator.prepare(models[0], models[1], loader)
elif arguments.shards:
    first, second = map(fully_shard, models)
else:
    first, second = map(torch.nn.parallel.DistributedDataParallel, models)
optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (first, second)]
norms = Norms()
if arguments.by_hand:
    sums = session.state(per_rank=True, loss=0.0, seen=0)
else:
    sums = session.state(per_rank=True, reset="epoch", loss=0.0, seen=0)
if arguments.accelerate:
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    epochs = accelerator.epochs(loader, 3, updates=arguments.updates)
else:
    own = {"per_rank": {"norms": norms}} if arguments.by_hand else {}
    own |= {"snapshot_every": 4} if arguments.shards else {}
    session.protect(first=first, second=second, critic=optimizers[0], generator=optimizers[1], **own)
    if not arguments.one_loop:
        sampled = DataLoader(dataset, 4, sampler=torch.utils.data.DistributedSampler(dataset))
        epochs = session.epochs(sampled, 3, updates=arguments.updates)


def train(step: keepstep.Step, batch: list[torch.Tensor]) -> None:
    (x,) = batch
    assert x.abs().max() < 50, "the batch of the step before, which has changed it"
    optimizer = optimizers[step.update % 2]
    optimizer.zero_grad()
    loss = second(first(x).relu()).square().mean()
    if arguments.accelerate:
        accelerator.backward(loss)
    else:
        loss.backward()
    sums.loss += loss.item() * len(x)
    sums.seen += len(x)
    norms.total = norms.total + x.norm()
    x += 100.0  # in place
    if arguments.one_loop and step.is_epoch_end:
        tell(step.epoch)
    optimizer.step()


def tell(epoch: int) -> None:
    total = torch.tensor([sums.loss, sums.seen], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    session.defer(
        write, f"epoch {epoch}: {total[0] / total[1]} of {total[1]}, norms {norms.total if arguments.by_hand else 0}"
    )
    session.defer(die, f"epoch {epoch}", arguments.dies_after)


def die(line: str, struck: Path | None) -> None:
    if struck and session.rank == 1 and line.startswith("epoch 1") and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def write(line: str) -> None:
    die(line, arguments.dies)
    with Path(f"means-of-{session.rank}.txt").open("a") as file:
        file.write(line + "\n")


if arguments.one_loop:
    sampled = DataLoader(dataset, 4, sampler=torch.utils.data.DistributedSampler(dataset))
    for step, batch in session.batches(sampled, epochs=3, updates=arguments.updates):
        with step:
            train(step, batch)
else:
    for epoch in epochs:
        if arguments.by_hand:
            sums.loss, sums.seen = 0.0, 0
            norms.total = torch.zeros(())
        epoch.run(train)
        tell(epoch)
