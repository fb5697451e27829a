"""Epochs over a torch DataLoader with augmentation, as torchvision's and many other scripts have them.

Usage: keepstep run --nproc-per-node 3 tests/scripts/epochs.py [--epochs N] [--workers N] [--accumulate N]
    [--step-sampler]
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepstep
from keepstep.data import StepSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--step-sampler", action="store_true", help="keepstep's sampler in place of torch's")
arguments = parser.parse_args()

torch.set_num_threads(1)
session = keepstep.init(seed=3)


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 130

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = torch.full((3, 8, 8), index / 130)
        return picture + 0.1 * torch.rand(3, 8, 8), torch.tensor(index % 5)  # augmentation


model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
session.protect(model=ddp, optimizer=optimizer, scheduler=scheduler)
if arguments.step_sampler:
    order = {"batch_sampler": StepSampler(130, 4, session.data_world_size, seed=4)}
else:
    order = {"batch_size": 4, "sampler": DistributedSampler(Pictures(), seed=4)}
loader = DataLoader(Pictures(), num_workers=arguments.workers, **order)
for step, batch in session.batches(loader, epochs=arguments.epochs, accumulate=arguments.accumulate):
    with step:
        optimizer.zero_grad()
        for pictures, labels in batch if arguments.accumulate > 1 else [batch]:
            pictures -= pictures.mean()  # in place: the same batch must come again as it was
            nn.functional.cross_entropy(ddp(pictures), labels).backward()
        optimizer.step()
        if step.is_epoch_end:
            scheduler.step()
    if step.committed and step.is_epoch_end and session.is_main:
        print(f"epoch {step.epoch} ends after step {step.index}", flush=True)
