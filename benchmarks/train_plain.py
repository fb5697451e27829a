"""The worker of `benchmarks/recovery.py`: one step in a loop, under torchrun or, with --keepstep, under keepstep.

Model, optimizer, schedule and data are those of `examples/train_gpt.py`; the step itself is `train_step`, the same
lines for both. What differs is what the user's script would differ in: `train_plain` joins a gloo group and, with
--checkpoint, saves every few steps and loads at the start; `train_kept` has init, protect and the step loop.

Each rank appends to a file ``events-RANK`` in --events, a line of words for each thing that happened:

    ATTEMPT start PID AT CPU      the process has a rank
    ATTEMPT step INDEX AT CPU     it completed a step
    ATTEMPT save MS AT CPU        rank 0 wrote a checkpoint

ATTEMPT counts restarts under torchrun and generations under keepstep; AT is the machine's monotonic clock and CPU the
processor time of the process so far, both in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import select
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
GATE_DEADLINE_S = 300.0


def load_example() -> ModuleType:
    """`examples/train_gpt.py` as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


class Events:
    """One rank's lines; each is one write to a file opened for appending, so a killed process leaves whole lines."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.attempt = attempt
        self._file = os.open(folder / f"events-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.note("start", os.getpid())

    def note(self, what: str, value: object) -> None:
        """Appends a line with the time of now."""
        os.write(self._file, f"{self.attempt} {what} {value} {time.monotonic()!r} {time.process_time()!r}\n".encode())


class Gate:
    """Lets this rank begin a block of steps when its turn comes: two jobs then take turns on the same cores.

    The parent puts one byte into the pipe ``go-RANK`` for each block; the rank answers with one in ``arrived``.
    """

    def __init__(self, folder: Path, rank: int, block: int) -> None:
        self._block = block
        self._go = os.open(folder / f"go-{rank}", os.O_RDWR)
        self._arrived = os.open(folder / "arrived", os.O_RDWR)

    def pass_before(self, step: int) -> None:
        """Waits at the beginning of a block."""
        if step % self._block:
            return
        os.write(self._arrived, b"x")
        if not select.select([self._go], [], [], GATE_DEADLINE_S)[0]:
            raise TimeoutError(f"no turn within {GATE_DEADLINE_S:g} s before step {step}")
        os.read(self._go, 1)


class Job:
    """What both variants train."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.example = load_example()
        model = self.example.build_model(args.size, args.seed)
        self.model = DistributedDataParallel(model)
        self.optimizer = self.example.build_optimizer(self.model, args.lr)
        self.scheduler = self.example.build_scheduler(self.optimizer, args.steps)
        context = self.example.SIZES[args.size].context
        self.data = self.example.Windows(
            self.example.read_text(), context, args.batch_size, dist.get_world_size(), args.seed
        )
        self.events: Events | None = None
        self.gate: Gate | None = None

    def begin(self, rank: int, attempt: int) -> None:
        """The rank is known."""
        self.events = Events(self.args.events, rank, attempt)
        if self.args.gate is not None:
            self.gate = Gate(self.args.gate, rank, self.args.block)

    def train_step(self, step: int, rank: int) -> None:
        """The step, as in the example."""
        loss = self.model(*self.data.batch(step, rank))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def train_kept(args: argparse.Namespace) -> None:
    """The loop under keepstep."""
    import keepstep

    session = keepstep.init(seed=args.seed)
    job = Job(args)
    session.protect(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler)
    for step in session.steps(args.steps):
        if job.events is None:
            job.begin(session.rank, session.generation)
        assert job.events is not None
        job.events.attempt = session.generation
        if job.gate is not None:
            job.gate.pass_before(step.index)
        with step:
            job.train_step(step.index, session.rank)
        # A step whose end met a failure counts, but a recovery lies between its end and this line.
        if step.committed and session.generation == job.events.attempt:
            job.events.note("step", step.index)


def train_plain(args: argparse.Namespace) -> None:
    """The loop under torchrun."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(args)
    torch.manual_seed(args.seed + rank)
    first = load(job, args.checkpoint) if args.checkpoint is not None else 0
    job.begin(rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))  # environ: torchrun's only way to say it
    assert job.events is not None
    for step in range(first, args.steps):
        if job.gate is not None:
            job.gate.pass_before(step)
        job.train_step(step, rank)
        job.events.note("step", step)
        if args.checkpoint is not None and rank == 0 and (step + 1) % args.checkpoint_every == 0:
            begun = time.monotonic()
            save(job, args.checkpoint, step + 1)
            job.events.note("save", round((time.monotonic() - begun) * 1000, 3))
    dist.destroy_process_group()


def save(job: Job, path: Path, step: int) -> None:
    """Writes a checkpoint, whole or not at all."""
    draft = path.with_suffix(".draft")
    state = {
        "model": job.model.module.state_dict(),
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
    job.model.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.scheduler.load_state_dict(state["scheduler"])
    return int(state["step"])


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keepstep", action="store_true", help="under keepstep in place of torchrun")
    parser.add_argument("--events", type=Path, required=True, help="folder for the event files")
    parser.add_argument("--size", default="10m", help="a size of examples/train_gpt.py")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoint (torchrun only)")
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--gate", type=Path, help="folder with the pipes of a job that takes turns")
    parser.add_argument("--block", type=int, default=6, help="steps in a turn")
    args = parser.parse_args()
    if args.keepstep:
        train_kept(args)
    else:
        train_plain(args)


if __name__ == "__main__":
    main()
