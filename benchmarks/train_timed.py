"""The worker of `overhead.py` and `snapshots.py`: a model in a loop, under torchrun or, with --keepstep, keepstep.

The two variants differ only in the lines that a user would change: `keepstep.init`, `protect` and the loop. With
--snapshots each rank has a separate model, which stands for a part of a larger one. Then a rank waits for others only
in the gradient barrier.

After each block of steps, each rank appends to ``steps-RANK`` in --folder a record of two int64 for each step: when it
ended (monotonic clock) and the processor time of the process so far, in nanoseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GATE_DEADLINE_S = 300.0


def build_model(width: int, depth: int) -> nn.Module:
    """Returns a multi-layer perceptron."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


class Training:
    """The training of both variants: a model, AdamW, and a schedule of the learning rate."""

    def __init__(self, model: nn.Module, width: int, batch: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + step * 1e-6))
        self._features = torch.randn(batch, width)

    def step(self) -> None:
        """Runs one optimizer step."""
        self.model(self._features).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class Gate:
    """Makes this rank wait for its turn before a block of steps, so that two jobs take turns on the same cores.

    The parent writes one byte to the pipe ``go-RANK`` for each block. The rank answers with one byte in ``arrived``.
    """

    def __init__(self, folder: Path, rank: int, block: int) -> None:
        self._block = block
        self._go = os.open(folder / f"go-{rank}", os.O_RDWR)
        self._arrived = os.open(folder / "arrived", os.O_RDWR)

    def pass_before(self, step: int) -> None:
        """Waits for its turn, if a block begins with this step."""
        if step % self._block:
            return
        os.write(self._arrived, b"x")
        if not select.select([self._go], [], [], GATE_DEADLINE_S)[0]:
            raise TimeoutError(f"no turn within {GATE_DEADLINE_S:g} s before step {step}")
        os.read(self._go, 1)


class Times:
    """Records when steps end. Passes the gate before each block of them."""

    def __init__(self, folder: Path, rank: int, block: int) -> None:
        self._gate, self._block = Gate(folder, rank, block), block
        self._file = (folder / f"steps-{rank}").open("ab", buffering=0)
        self._records: list[bytes] = []

    def before(self, step: int) -> None:
        """Call it before each step."""
        if step % self._block == 0:
            self._file.write(b"".join(self._records))
            self._records.clear()
            self._gate.pass_before(step)

    def after(self) -> None:
        """Records the end of a step."""
        self._records.append(struct.pack("<2q", time.monotonic_ns(), time.process_time_ns()))


def train_kept(args: argparse.Namespace) -> None:
    """Runs the loop under keepstep."""
    import keepstep

    session = keepstep.init(seed=0)
    model = build_model(args.width, args.depth)
    training = Training(model if args.snapshots else DistributedDataParallel(model), args.width, args.batch)
    how: dict[str, Any] = {}
    if args.snapshots:
        every = int(args.snapshots) if args.snapshots.isdecimal() else args.snapshots
        how = {"shard": f"part {session.rank}", "snapshot_every": every}
    session.protect(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler, **how)
    times = None
    for step in session.steps(args.steps):
        times = times or Times(args.folder, session.rank, args.block)
        times.before(step.index)
        with step:
            training.step()
        times.after()


def train_plain(args: argparse.Namespace) -> None:
    """Runs the loop under torchrun."""
    dist.init_process_group("gloo")
    training = Training(DistributedDataParallel(build_model(args.width, args.depth)), args.width, args.batch)
    times = Times(args.folder, dist.get_rank(), args.block)
    for step in range(args.steps):
        times.before(step)
        training.step()
        times.after()
    dist.destroy_process_group()


def profiled(train: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Trains under Python's profiler, and writes rank 0's profile to ``profile`` in the folder."""
    profiler = cProfile.Profile()
    profiler.enable()
    train(args)
    profiler.disable()
    if os.environ["RANK"] == "0":  # environ: both launchers set it
        profiler.dump_stats(args.folder / "profile")


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keepstep", action="store_true", help="under keepstep in place of torchrun")
    parser.add_argument("--folder", type=Path, required=True, help="for the records and the pipes of the gate")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per rank")
    parser.add_argument("--block", type=int, required=True, help="steps in a turn")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--snapshots", help="with --keepstep: what protect() gets as snapshot_every")
    args = parser.parse_args()
    train = train_kept if args.keepstep else train_plain
    if args.profile:
        profiled(train, args)
    else:
        train(args)


if __name__ == "__main__":
    main()
