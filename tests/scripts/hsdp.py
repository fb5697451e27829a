"""A small transformer under HSDP: fully sharded block by block over 2 ranks, and as many replicas as there are ranks.

Usage: keepstep run --nproc-per-node 4 tests/scripts/hsdp.py [--steps N] [--replicas N] [--snapshot-every N] [--groups]
    [--checkpoint-dir DIR] [--muon] [--average] [--statistic]

With --groups each rank says after a recovery which of its groups are those of before, with the same connections.
"""

import argparse
import hashlib
import os
import signal
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--snapshot-every", default="auto")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--forever", action="store_true")
parser.add_argument("--kill-at", type=int)
parser.add_argument("--groups", action="store_true")
parser.add_argument("--muon", action="store_true", help="trains the blocks' matrices by Muon")
parser.add_argument("--average", action="store_true", help="keeps a moving average of the parameters, as DTensors")
parser.add_argument("--statistic", action="store_true", help="keeps a mean of each rank's own samples in a buffer")
arguments = parser.parse_args()

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, which this script does not write to
torch.set_num_threads(1)
session = keepstep.init(seed=3)
WIDTH, VOCABULARY, CONTEXT = 24, 19, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if arguments.statistic:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        y = self.norm(x - self.mean)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        result: torch.Tensor = x + self.wide(x)
        return result


model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))
sizes = (arguments.replicas, session.world_size // arguments.replicas)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
for block in model:
    if isinstance(block, Block):
        fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
every = int(arguments.snapshot_every) if arguments.snapshot_every.isdecimal() else arguments.snapshot_every
matrices = [p for block in model[1:3] for p in block.parameters() if arguments.muon and p.ndim == 2]
by_adam = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": torch.optim.Adam(by_adam, lr=0.01)}
if matrices:
    optimizers["muon"] = torch.optim.Muon(matrices, lr=0.01)


class Average:
    """Of all parameters, over the steps."""

    def __init__(self) -> None:
        self.shards = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.shards[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.shards)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, shard in state.items():
            self.shards[name].copy_(shard)


average = {"average": Average()} if arguments.average else {}
where = arguments.checkpoint_dir
session.protect(
    model=model,
    **optimizers,
    **average,
    snapshot_every=every,
    checkpoint_dir=where,
    checkpoint_every=100 if arguments.forever else 3,
)


def insides() -> dict[str, tuple[object, ...]]:
    """What is inside of each group of the mesh: its communicator, and the inodes of its connections."""
    inner = {name: mesh.get_group(name)._communicators.own for name in ("replicate", "shard")}
    return {
        name: (each, each._communicator, *(os.fstat(end.fileno()).st_ino for end in each._connections._sockets))
        for name, each in inner.items()
    }


before: dict[str, tuple[object, ...]] = {}
for step in session.steps(100_000 if arguments.forever else arguments.steps):
    if arguments.groups:
        now = insides()
        if step.resumed and before:
            kept = [name for name in now if now[name] == before[name]]
            print(f"rank {session.rank} step {step.index} kept {' and '.join(kept) or 'none'}", flush=True)
        before = now
    with step:
        assert session._recovery is not None
        if step.index == arguments.kill_at and session.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        session._recovery.flush()  # waits for this rank's part of the checkpoint that is being written
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        for each in average.values():
            each.update()
    if arguments.forever and session.is_main and step.index == 10:
        print("trains", flush=True)
if where is not None:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizers["optimizer"].state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            digest.update(tensor.full_tensor().numpy().tobytes())
        digest.update(state["step"].numpy().tobytes())
    if session.is_main:
        print(digest.hexdigest(), flush=True)
if session.is_main:
    print("done", flush=True)
