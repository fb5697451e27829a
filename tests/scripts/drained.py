"""Trains slowly enough to be told to end: with a checkpoint of keepstep's, or with a handler of its own that saves."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import keepstep

folder, way, num_steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
told_to_end = False


def handle(_number: int, _frame: FrameType | None) -> None:
    global told_to_end
    told_to_end = True


session = keepstep.init(seed=3)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if way == "handles":
    signal.signal(signal.SIGTERM, handle)
if way == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if way == "counts" and session.rank == 1:
    signal.signal(signal.SIGUSR1, lambda *_: print("rank 1 has got SIGUSR1", flush=True))
session.protect(model=model, optimizer=optimizer, checkpoint_dir=folder if way in ("checkpoint", "loads") else None)
saved = folder / "saved.pt"
start = 0
if way == "handles" and saved.exists():
    loaded = torch.load(saved)
    start = loaded["step"]
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def samples() -> Iterator[tuple[keepstep.Step, torch.Tensor | None]]:
    if way != "loads":
        yield from ((step, None) for step in session.steps(num_steps, start=start))
        return
    loader = DataLoader(TensorDataset(torch.randn(4 * num_steps, 8)), batch_size=4, num_workers=2)
    yield from ((step, data) for step, (data,) in session.batches(loader, epochs=1))


for step, data in samples():
    with step:
        data = torch.randn(4, 8) if data is None else data
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if way == "reduces":  # after the update, and into a parameter: cut off, it would leave every copy torn
            torch.distributed.all_reduce(loss.detach())
            with torch.no_grad():
                model.module.bias.add_(loss, alpha=0.0)
    if step.index == 10:
        print(f"rank {session.rank} trains", flush=True)
        if way == "tells" and session.rank == 1:
            print(f"rank 1 trains as {os.getpid()}", flush=True)
    if step.index % 200 == 199:
        print(f"rank {session.rank} goes on", flush=True)
if told_to_end:
    torch.distributed.barrier()  # the groups are whole
    if session.rank == 0:
        state = {"step": step.index + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, saved)
    print(f"rank {session.rank} has saved after {step.index + 1} steps", flush=True)
    sys.exit(0)
print(f"rank {session.rank} is through, {[p.tolist() for p in model.parameters()]!r}", flush=True)
