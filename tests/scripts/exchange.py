"""Exchanges objects and statistics while it starts, in every way that a script may, and trains with what it got."""

import argparse
import os
import signal
import uuid

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepstep

STEPS = 30


def exchange(rank: int, size: int) -> dict[str, object]:
    """What all ranks know afterwards. `run` is another one in each process, so only rank 0's own may be seen."""
    shared = [{"run": str(uuid.uuid4()), "lr": 0.05}] if rank == 0 else [None]
    dist.broadcast_object_list(shared, src=0)
    part: list[object] = [None]
    dist.scatter_object_list(part, [{"part": each, "by": os.getpid()} for each in range(size)] if rank == 0 else None)
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "pid": os.getpid()})
    collected: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object({"rank": rank, "pid": os.getpid()}, collected, dst=1)

    mean = torch.tensor([float(rank + 1)])
    dist.all_reduce(mean)
    seed = torch.tensor([rank * 17 + 5])
    dist.broadcast(seed, src=size - 1)
    ends = dist.new_group([0, size - 1])
    pair: list[object] = [None]
    if rank in (0, size - 1):
        pair = [{"from": os.getpid()}]
        dist.broadcast_object_list(pair, src=size - 1, group=ends)
    token = torch.zeros(1)
    if rank == 0:
        dist.send(torch.tensor([3.5]), dst=1)
    elif rank == 1:
        dist.recv(token, src=0)
    return {
        "shared": shared[0],
        "part": part[0],
        "everyone": everyone,
        "collected": collected,
        "mean": mean.item() / size,
        "seed": int(seed),
        "pair": pair[0],
        "token": token.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int, help="rank 0 of the first generation kills itself in this step")
    arguments = parser.parse_args()
    session = keepstep.init()
    known = exchange(session.rank, session.world_size)
    shared = known["shared"]
    assert isinstance(shared, dict)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=shared["lr"])
    session.protect(model=model, optimizer=optimizer)
    for step in session.steps(STEPS):
        with step:
            if step.index == 0 and step.attempt == 0:
                print(f"EXCHANGED {session.rank} at the start: {known}", flush=True)
            if step.index == arguments.kill_at and session.rank == 0 and session.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = ((model(torch.randn(8, 4)) - known["mean"]) * known["seed"]).square().mean() + known["token"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"EXCHANGED {session.rank} at the end: {known}", flush=True)


if __name__ == "__main__":
    main()
