"""A step with everything that one may have: accumulation, two optimizers, clipping, scaler, scheduler, BatchNorm,
dropout, tied weights, an EMA copy, a stateful loader, and all three random number generators."""

import argparse
import contextlib
import random

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--bucket-view", action="store_true")
parser.add_argument("--find-unused", action="store_true")
parser.add_argument("--zero-to-none", type=int, default=1)
arguments = parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(32, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.1)
        self.hidden = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight  # tied
        self.unused = torch.nn.Linear(2, 2) if arguments.find_unused else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.drop(self.norm(self.table(tokens)))))


class Counter:
    """A loader with a position, as torchdata's have."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


session = keepstep.init(seed=11)
torch.manual_seed(1)
model = DistributedDataParallel(
    Net(),
    gradient_as_bucket_view=arguments.bucket_view,
    find_unused_parameters=arguments.find_unused,
    bucket_cap_mb=0.001,
)
names = dict(model.named_parameters())
first = torch.optim.AdamW([p for n, p in names.items() if "hidden" in n], lr=1e-2, amsgrad=True)
second = torch.optim.SGD([p for n, p in names.items() if "hidden" not in n], lr=1e-2, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.05, total_steps=arguments.steps)
drops = torch.optim.lr_scheduler.MultiStepLR(second, milestones=[5, 11])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
loader = Counter()
session.protect(
    model=model,
    first=first,
    second=second,
    schedule=schedule,
    drops=drops,
    scaler=scaler,
    average=average,
    loader=loader,
)

for step in session.steps(arguments.steps):
    with step:
        for part in range(2):
            last = part == 1
            number = next(loader) * 1000 + session.rank * 10 + random.randrange(3) + np.random.randint(3)
            tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(int(number)))
            with contextlib.nullcontext() if last else model.no_sync():
                scaler.scale(torch.nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)).backward()
        scaler.unscale_(first)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        schedule.step()
        drops.step()
        average.update_parameters(model.module)
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=bool(arguments.zero_to_none))
