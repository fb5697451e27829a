"""A script with books of its own: the best weights so far, the same on all ranks, and each rank's own running loss and
journal."""

import argparse
import os
import signal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--checkpoint-dir")
parser.add_argument("--kill-all-at", type=int, help="every rank kills itself in this step of generation 1")
parser.add_argument("--late", action="store_true", help="changes a rank's own value after the update")
parser.add_argument("--behind", action="store_true", help="changes a rank's own value after the with")
parser.add_argument("--differ", action="store_true", help="gives a replicated value another content on each rank")
parser.add_argument("--large", type=int, default=0, help="bytes of one more value of each rank")
parser.add_argument("--fsdp2", action="store_true", help="each rank holds a part of the parameters")
arguments = parser.parse_args()


class Journal:
    """An object of each rank's own, which is not written in every step."""

    def __init__(self):
        self.pages = []

    def state_dict(self):
        return {"pages": self.pages}

    def load_state_dict(self, state):
        self.pages = list(state["pages"])


session = keepstep.init(seed=5)
torch.manual_seed(0)
books = session.state(best=float("inf"), best_at=-1, wins=0, losses=[])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
if arguments.fsdp2:
    fully_shard(model, mesh=init_device_mesh("cpu", (session.world_size,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
journal = Journal()
session.protect(
    model=model,
    optimizer=optimizer,
    checkpoint_dir=arguments.checkpoint_dir,
    checkpoint_every=5,
    snapshot_every=2 if arguments.fsdp2 else "off",
    per_rank={"journal": journal},
)
own = session.state("own", per_rank=True, count=0, total=torch.zeros(()), ranks=[], ballast=b"")

for step in session.steps(arguments.steps):
    if step.index % 3 == 1:
        local = (each.to_local() if arguments.fsdp2 else each for each in model.parameters())
        loss = sum(parameter.detach().abs().sum() for parameter in local).reshape(1)
        torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.MAX)
        if loss.item() < books.best:
            books.best, books.best_at = loss.item(), step.index
    with step:
        if session.generation == 1 and step.index == arguments.kill_all_at:
            session._recovery.flush()  # waits for the checkpoint that is being written
            torch.distributed.barrier()  # all are in this step; if one dies early the barrier echoes, and the next dies
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step.index * 100 + session.rank))
        loss = model(data).pow(2).mean()
        loss.backward()
        own.count += 1
        own.total += loss.detach()
        own.ranks.append(session.rank)
        own.ballast = b"x" * arguments.large
        if (step.index + session.rank) % 3 == 0:
            journal.pages.append((session.rank, step.index, loss.item()))
        if arguments.differ and step.index > 2:
            books.best_at = 100 + session.rank
        optimizer.step()
        books.losses = [*books.losses[-9:], books.best]
        if arguments.late and step.index == 2:
            own.ranks.append(-1)
        optimizer.zero_grad()
    if step.committed:
        books.wins += 1
    if arguments.behind and step.index == 2:
        own.count += 1

assert own.ranks == [session.rank] * arguments.steps
assert own.count == books.wins == arguments.steps
written = [index for index in range(arguments.steps) if (index + session.rank) % 3 == 0]
assert [page[:2] for page in journal.pages] == [(session.rank, index) for index in written]
print(
    f"rank {session.rank}: {own.total.item()!r} {books.best!r} {books.best_at} {books.losses} {journal.pages}",
    flush=True,
)
