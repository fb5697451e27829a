"""A trainer that gives its weights to an engine every few steps.

The engine, the same script with the flag `engine`, runs beside it, answers with the newest weights, and never ends.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 24, 4
OUT = Path("out")


def make_model():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def publish(model, version):
    torch.save({"version": version, "weights": model.state_dict()}, OUT / "weights.tmp")
    os.replace(OUT / "weights.tmp", OUT / "weights.pt")


def engine():
    model, answered = make_model(), -1
    while True:
        if (OUT / "weights.pt").exists():
            content = torch.load(OUT / "weights.pt")
            model.load_state_dict(content["weights"])
            version = content["version"]
            if version > answered:
                print(f"version {version} answers {model(torch.ones(8)).item():.6f}", flush=True)
                answered = version
        time.sleep(0.1)


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for step in range(STEPS):
        train_step(step)
        if dist.get_rank() == 0 and (step + 1) % EVERY == 0:
            publish(model.module, step + 1)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), OUT / "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    engine() if sys.argv[1:] == ["engine"] else train()
