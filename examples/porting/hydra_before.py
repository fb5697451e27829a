"""In the style of Hydra: flags override a config, each run has a folder named by its start, losses are in a list."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONFIG = {"steps": 24, "lr": 0.1, "log_every": 4}


def read_config(overrides):
    given = dict(each.split("=") for each in overrides)
    return {name: type(value)(given.get(name, value)) for name, value in CONFIG.items()}


def main(config):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = Path(time.strftime("out/%Y-%m-%d_%H-%M-%S"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    losses = []

    def train_step(step):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        optimizer.step()

    for step in range(config["steps"]):
        train_step(step)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), folder / "last.pt")
        (folder / "losses.json").write_text(json.dumps(losses))
        Path("out/latest").symlink_to(folder.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_config(sys.argv[1:]))
