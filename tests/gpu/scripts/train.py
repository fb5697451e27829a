"""A small DDP job for drills: every rank on its own device, which is the CPU where there is no GPU."""

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

NUM_STEPS = 20


def main() -> None:
    session = keepstep.init(seed=1)
    device = session.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8)
    ).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    session.protect(model=ddp, optimizer=optimizer)
    for step in session.steps(NUM_STEPS):
        with step:
            inputs = torch.randn(32, 64, device=device)
            loss = ddp(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


main()
