"""A script that reduces its loss for a log line after the update, as many scripts do.

If a rank is lost during this reduction, the others keep their weights. The log line of that step shows ``missing``.

    keepstep run --nproc-per-node 3 --spares 1 examples/train_logged.py
    keepstep drill --nproc-per-node 3 --spares 1 examples/train_logged.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import keepstep


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a small network to a sine.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    args = parser.parse_args()

    session = keepstep.init(seed=0)  # instead of init_process_group(); also seeds the random numbers of the start
    x = torch.linspace(-3, 3, 512)[:, None]
    dataset = TensorDataset(x, x.sin())
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    for step, (inputs, targets) in session.batches(loader, steps=args.steps):
        with step:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step.index % args.log_every == 0:
                mean = loss.detach()
                dist.all_reduce(mean)
                mean /= session.world_size
                if session.rank == 0:
                    print(f"step {step.index:4d}  loss {mean.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
