"""The worker of `snapshots_kills.py`: a model of equal blocks under FSDP2 or DDP, by keepstep or by torchrun.

Under torchrun it writes an asynchronous checkpoint of torch's DCP in each step, and starts from the newest complete
one. Each rank writes the events that `train_plain.py` describes.
"""

from __future__ import annotations

import argparse
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_plain import Events, seed_step

KEPT_CHECKPOINTS = 2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + nn.functional.gelu(self.linear(self.norm(x)))
        return result


class Training:
    """A model, sharded over the ranks or replicated, and Adam."""

    def __init__(self, args: argparse.Namespace, world_size: int) -> None:
        """Makes the model. With --mesh-first it makes the mesh before: a spare waits there, and has no model yet."""
        self._shape = args.batch, args.width
        if args.parallel == "ddp":
            self.model: nn.Module = DistributedDataParallel(self._build(args))
        else:
            mesh = init_device_mesh("cpu", (world_size,)) if args.mesh_first else None
            model = self._build(args)
            mesh = mesh or init_device_mesh("cpu", (world_size,))
            for block in model:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    @staticmethod
    def _build(args: argparse.Namespace) -> nn.Sequential:
        torch.manual_seed(args.seed)
        return nn.Sequential(*(Block(args.width) for _ in range(args.depth)))

    def step(self) -> None:
        """Runs one step on random numbers."""
        self.model(torch.randn(self._shape)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_kept(args: argparse.Namespace) -> None:
    """Runs the loop under keepstep."""
    import keepstep

    session = keepstep.init(seed=args.seed)
    training = Training(args, session.world_size)
    session.protect(model=training.model, optimizer=training.optimizer, snapshot_every=args.snapshot_every)
    events = None
    for step in session.steps(args.steps):
        events = events or Events(args.events, session.rank, session.generation)
        events.attempt = session.generation
        with step:
            training.step()
        if step.committed and session.generation == events.attempt:
            events.note("step", step.index)


def train_plain(args: argparse.Namespace) -> None:
    """Runs the loop under torchrun."""
    dist.init_process_group("gloo")
    training = Training(args, dist.get_world_size())
    events = Events(args.events, dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))  # environ: torchrun's
    saver = Saver(training, args.checkpoints)
    for step in range(saver.load(), args.steps):
        seed_step(args.seed, step, dist.get_rank())
        training.step()
        saver.save(step + 1)
        events.note("step", step)


class Saver:
    """Writes checkpoints with torch's DCP, one after the other in the background."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._group = dist.new_group()  # so that its thread's collectives do not mix with those of training
        self._running: Future[Any] | None = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _whole(self) -> list[int]:
        """Returns the steps of the complete checkpoints, newest first. DCP writes the metadata last."""
        return sorted((int(path.parent.name) for path in self._folder.glob("*/.metadata")), reverse=True)

    def load(self) -> int:
        """Loads the newest checkpoint, and returns the step to begin with."""
        if not (whole := self._whole()):
            return 0
        state = self._state()
        checkpoint.load(state, checkpoint_id=self._folder / str(whole[0]))
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return whole[0]

    def save(self, step: int) -> None:
        """Begins a checkpoint, after the previous one is on disk, as torch requires."""
        if self._running is not None:
            self._running.result()
        if dist.get_rank() == 0:
            for old in self._whole()[KEPT_CHECKPOINTS:]:
                shutil.rmtree(self._folder / str(old))
        where = self._folder / str(step)
        self._running = checkpoint.async_save(self._state(), checkpoint_id=where, process_group=self._group)


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keepstep", action="store_true", help="under keepstep in place of torchrun")
    parser.add_argument("--events", type=Path, required=True, help="folder for the event files")
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--mesh-first", action="store_true", help="make the mesh before the model")
    parser.add_argument("--snapshot-every", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="folder, under torchrun")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (train_kept if args.keepstep else train_plain)(args)


if __name__ == "__main__":
    main()
