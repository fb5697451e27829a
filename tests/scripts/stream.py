"""A dataset that can only be read from the front, and each rank reads another one.

Usage: keepstep run --nproc-per-node 3 tests/scripts/stream.py [--datasets]

``--datasets``: of Hugging Face's datasets, and so short that there are several epochs.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import keepstep

torch.set_num_threads(1)
session = keepstep.init(seed=3)


class Stream(IterableDataset[torch.Tensor]):
    """Every ``world_size``-th number, from this rank's on."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for self.position in range(self.position + 1, 50):  # noqa: B020 - it is the position
            yield torch.full((8,), self.position * session.world_size + session.rank) / 100 + 0.1 * torch.rand(8)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.position = content["position"]


def streamed() -> Any:
    from datasets import Dataset

    numbers = range(session.rank, 24 * session.world_size, session.world_size)
    return Dataset.from_dict({"x": [[number / 100] * 8 for number in numbers]}).to_iterable_dataset(num_shards=4)


def collated(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(row["x"]) + 0.1 * torch.rand(8) for row in rows])


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters())
if "--datasets" in sys.argv:
    loader = DataLoader(streamed(), batch_size=4, collate_fn=collated)
else:
    loader = DataLoader(Stream(), batch_size=4)
batches = session.batches(loader, steps=40, accumulate=2)
session.protect(model=model, optimizer=optimizer)
for step, (first, second) in batches:
    with step:
        (model(first).square().mean() + model(second).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
