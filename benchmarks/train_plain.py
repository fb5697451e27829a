"""The worker of `recovery.py` and `peers.py`: one step in a loop, under torchrun or, with --keepstep, under keepstep.

Model, optimizer, schedule and data are those of `examples/train_gpt.py`. Both variants share the step, `train_step`.
They differ only in the lines that a user would change: `train_plain` joins a gloo group and, with --checkpoint, saves
every few steps and loads at the start; `train_kept` has init, protect and the step loop.

Each rank appends to a file ``events-RANK`` in --events, one line for each event:

    ATTEMPT start PID AT CPU      the process has a rank
    ATTEMPT step INDEX AT CPU     it completed a step
    ATTEMPT save MS AT CPU        rank 0 wrote a checkpoint
    ATTEMPT moved MS AT CPU       from the first bucket of state to the last one that it received or sent
    ATTEMPT world SIZE AT CPU     number of ranks that train from the next step on; written when it changes
    ATTEMPT digest HASH AT CPU    hash of the parameters after the last step, with --digest-every

ATTEMPT counts restarts under torchrun and generations under keepstep; AT is the machine's monotonic clock and CPU the
processor time of the process so far, both in seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import xxhash
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"


def load_example() -> ModuleType:
    """Returns `examples/train_gpt.py` as a module."""
    sys.path.append(str(EXAMPLE.parent))
    return importlib.import_module(EXAMPLE.stem)


class Events:
    """The event file of one rank. Each line is one write in append mode, so a killed process leaves complete lines."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.attempt = attempt
        self._file = os.open(folder / f"events-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.note("start", os.getpid())

    def note(self, what: str, value: object) -> None:
        """Appends a line with the current time."""
        os.write(self._file, f"{self.attempt} {what} {value} {time.monotonic()!r} {time.process_time()!r}\n".encode())


class Job:
    """The training of all variants.

    Args:
        args: the command line.
        wrap: wraps the model.
        world_size: how many ranks share the data; by default the world size of torch.distributed.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
        world_size: int | None = None,
    ) -> None:
        self.args = args
        self.example = load_example()
        self.model = wrap(self.example.build_model(args.size, args.seed))
        self.optimizer = self.example.build_optimizer(self.model, args.lr)
        self.scheduler = self.example.build_scheduler(self.optimizer, args.steps)
        self.data = self.example.Windows(
            self.example.read_text(),
            self.example.SIZES[args.size].context,
            args.batch_size,
            world_size or dist.get_world_size(),
            args.seed,
        )
        self.events: Events | None = None

    def begin(self, rank: int, attempt: int) -> None:
        """Opens the event file, when the rank is known."""
        self.events = Events(self.args.events, rank, attempt)

    def train_step(self, step: int, rank: int) -> None:
        """Runs a step, as in the example."""
        loss = self.model(*self.data.batch(step, rank))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def completed(self, step: int) -> None:
        """Records a completed step, and with --digest-every the digest of the parameters after it."""
        assert self.events is not None
        self.events.note("step", step)
        if self.args.digest_every and (step + 1) % self.args.digest_every == 0:
            self.events.note("digest", digest(self.model))


def digest(model: nn.Module) -> int:
    """Returns a hash of all parameters with 52 bits, so that a float can hold it."""
    hashed = xxhash.xxh3_64()
    for parameter in model.parameters():
        hashed.update(parameter.detach().contiguous().numpy())
    return hashed.intdigest() >> 12


def train_kept(args: argparse.Namespace) -> None:
    """Runs the loop under keepstep."""
    import keepstep

    session = keepstep.init(seed=args.seed)
    job = Job(args)
    buckets: list[float] = []
    session._coordination.observe = lambda moment: buckets.append(time.monotonic()) if moment == "bucket" else None
    session.protect(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler)
    for step in session.steps(args.steps):
        if job.events is None:
            job.begin(session.rank, session.generation)
        assert job.events is not None
        job.events.attempt = session.generation
        if len(buckets) > 1:  # the begin of the first bucket is not known
            job.events.note("moved", (buckets[-1] - buckets[0]) * 1000 * len(buckets) / (len(buckets) - 1))
        buckets.clear()
        with step:
            job.train_step(step.index, session.rank)
        # A step that ends during a failure counts, but a recovery lies between its end and this line.
        if step.committed and session.generation == job.events.attempt:
            job.completed(step.index)


def train_plain(args: argparse.Namespace) -> None:
    """Runs the loop under torchrun."""
    timeout = None if args.collective_timeout is None else timedelta(seconds=args.collective_timeout)
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    job = Job(args)
    torch.manual_seed(args.seed + rank)
    first = load(job, args.checkpoint) if args.checkpoint is not None else 0
    job.begin(rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))  # environ: torchrun's only way to say it
    assert job.events is not None
    for step in range(first, args.steps):
        if args.checkpoint is not None:
            seed_step(args.seed, step, rank)
        job.train_step(step, rank)
        job.completed(step)
        if args.checkpoint is not None and rank == 0 and (step + 1) % args.checkpoint_every == 0:
            begun = time.monotonic()
            save(job, args.checkpoint, step + 1)
            job.events.note("save", round((time.monotonic() - begun) * 1000, 3))
    dist.destroy_process_group()


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds the random numbers from step and rank, so that a repeated step draws the same ones."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


def save(job: Job, path: Path, step: int) -> None:
    """Writes a checkpoint atomically."""
    draft = path.with_suffix(".draft")
    state = {
        "model": bare(job.model).state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "step": step,
    }
    torch.save(state, draft)
    draft.replace(path)


def load(job: Job, path: Path) -> int:
    """Loads the checkpoint, if there is one, and returns the step to begin with."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    bare(job.model).load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


def bare(model: nn.Module) -> nn.Module:
    """Returns the model without its wrapper, if it has one."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser with the flags of all variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True, help="folder for the event files")
    parser.add_argument("--size", default="10m", help="a size of examples/train_gpt.py")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoint (not under keepstep)")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--digest-every", type=int, default=0, help="steps between two digests; 0: none")
    parser.add_argument("--collective-timeout", type=float, help="seconds, in place of torch's default (torchrun only)")
    return parser


def main() -> None:
    """Parses the command line and trains."""
    parser = make_parser()
    parser.description = (__doc__ or "").splitlines()[0]
    parser.add_argument("--keepstep", action="store_true", help="under keepstep in place of torchrun")
    args = parser.parse_args()
    if args.keepstep:
        train_kept(args)
    else:
        train_plain(args)


if __name__ == "__main__":
    main()
