"""Time to restore the state of a replacement, compared with the limits of this machine.

    python benchmarks/restore.py            100 million parameters with Adam, two live holders, one replacement
    python benchmarks/restore.py --quick    a smoke test with a tiny model; nothing is written

There are three ranks, each a process with one thread for torch. Two hold the state, the third receives it, repeatedly.
Between the restores the same processes measure the floors of this machine, and the ways without keepstep.

Prints a table, and writes ``benchmarks/results/DATE-restore.md``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import page
import torch
from jobs import JobFailed
from page import RESULTS, Section
from rich.console import Console
from torch import distributed as dist
from weights_cast import IN_MEMORY

from keepstep.cancel import CancelToken
from keepstep.protocol.messages import Transfer
from keepstep.weights.memory.bytes_of import byte_view, digest_of
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import describe
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import Source, StateTransport, receive_state, send_state

CONTEXT = multiprocessing.get_context("spawn")
NUM_RANKS, RECEIVER = 3, 2
ROUTE = Transfer((0, 1), (RECEIVER,))
GIB = 1 << 30
PIECE_BYTES = 8 << 20
"""Size of a piece in the gloo floor. It is faster with these than with smaller ones."""
DEADLINE_S = 300.0

WAYS = {
    "restore": "as a recovery does it on one machine: the receiver reads in the buffers of both holders",
    "restore, by messages": "the same over the process group (gloo), as between machines",
    "floor, memcpy": "the receiver copies as many bytes once, while nobody else does anything",
    "floor, gloo": "each holder sends its half with gloo, straight out of and into the tensors",
    "checkpoint": "one holder saves with torch.save to a file in memory, the receiver loads it into its objects",
}


class Rank:
    """One rank's process."""

    def __init__(self, rank: int, width: int, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(int(rank == RECEIVER))  # the holders hold the same state
        sizes = itertools.cycle([(width, 4 * width), (4 * width, width)])
        self.model = torch.nn.Sequential(*(torch.nn.Linear(*next(sizes)) for _ in range(24)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer})
        self.rank, self.file = rank, folder / "state.pt"
        self.source, self.stop = Source(), CancelToken()
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=DEADLINE_S)
        )
        self.views = [byte_view(tensor) for _name, tensor in self.state.live_tensors()]
        self.spare = [torch.empty_like(view) for view in self.views]
        self._reach = neighbour.reach

    @property
    def num_bytes(self) -> int:
        """The size of the state."""
        return sum(view.numel() for view in self.views)

    def carry_out(self, way: str) -> float:
        """Runs one way, which all ranks begin together. Returns the seconds until it is complete on this rank."""
        neighbour.reach = self._reach if way == "restore" else lambda place: None
        if self.rank == RECEIVER and not way.startswith("floor"):
            for view in self.views:
                view.fill_(255)
        tasks: dict[str, Callable[[], None]] = {
            "restore": self.restore,
            "restore, by messages": self.restore,
            "floor, memcpy": self.copy,
            "floor, gloo": self.exchange,
            "checkpoint": self.checkpoint,
        }
        dist.barrier()
        begun_s = time.perf_counter()
        tasks[way]()
        seconds = time.perf_counter() - begun_s
        dist.barrier()
        self.file.unlink(missing_ok=True)
        return seconds

    def restore(self) -> None:
        """Restores the state as a recovery does."""
        way = StateTransport(dist.group.WORLD, self.stop)
        if self.rank == RECEIVER:
            receive_state(self.state, 1, self.rank, ROUTE, way, lambda: None)
        else:
            header, blocks = describe(self.state, 1)
            send_state(header, [block.held for block in blocks], self.rank, ROUTE, way, self.source, lambda: None)

    def copy(self) -> None:
        """Copies every byte once, on this rank."""
        if self.rank == RECEIVER:
            for spare, view in zip(self.spare, self.views, strict=True):
                spare.copy_(view)

    def exchange(self) -> None:
        """Sends every byte once, from the holders in turn."""
        works: list[Any] = []
        for number, piece in enumerate(piece for view in self.spare for piece in view.split(PIECE_BYTES)):
            holder = number % RECEIVER
            if self.rank == RECEIVER:
                works.append(dist.irecv(piece, holder))
            elif self.rank == holder:
                works.append(dist.isend(piece, RECEIVER))
            if len(works) > RECEIVER:
                works.pop(0).wait()
        for work in works:
            work.wait()

    def checkpoint(self) -> None:
        """Loads a checkpoint as a restart does, from files in memory."""
        if self.rank == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.file)
        dist.barrier()
        if self.rank == RECEIVER:
            saved = torch.load(self.file, mmap=True, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = ProtectedState({"model": self.model, "optimizer": self.optimizer})
            self.views = [byte_view(tensor) for _name, tensor in self.state.live_tensors()]

    def digest(self) -> str:
        """Returns a digest of the whole state."""
        return digest_of(self.state.live_tensors(), b"")


def take_part(rank: int, width: int, folder: Path, runs: int, answers: Connection) -> None:
    """Runs every way in turn, first once without counting it, and then ``runs`` times. Runs in a process of a rank."""
    here = Rank(rank, width, folder)
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(runs + 1):
        for way, seconds in measured.items():
            seconds.append(here.carry_out(way))
            answers.send(here.digest() if way.startswith(("restore", "checkpoint")) else None)
    answers.send((here.num_bytes, {way: seconds[1:] for way, seconds in measured.items()}))
    dist.destroy_process_group()


def measure(width: int, runs: int) -> dict[str, Any]:
    """Measures all ways.

    Raises:
        JobFailed: a process ended early, or the received state differs from the sent one.
    """
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        ends, processes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = CONTEXT.Pipe()
            arguments = (rank, width, Path(folder), runs, theirs)
            processes.append(CONTEXT.Process(target=take_part, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            for _run, way in itertools.product(range(runs + 1), WAYS):
                holder, _other, receiver = [_next(end) for end in ends]
                if holder != receiver:
                    raise JobFailed(f"{way}: the receiver has another state than was sent")
            *_holders, (num_bytes, seconds) = [_next(end) for end in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {"gib": round(num_bytes / GIB, 3), "seconds": seconds}


def _next(end: Connection) -> Any:
    if not end.poll(DEADLINE_S):
        raise JobFailed(f"a process said nothing for {DEADLINE_S:g} s")
    try:
        return end.recv()
    except EOFError:
        raise JobFailed("a process has ended early") from None


def section(result: dict[str, Any]) -> Section:
    """Returns the table."""
    medians = {way: statistics.median(seconds) for way, seconds in result["seconds"].items()}
    rows = []
    for way, seconds in result["seconds"].items():
        spread = f"{medians[way]:.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
        speed = f"{result['gib'] / medians[way]:.2f}"
        rows.append([way, spread, speed, f"{medians[way] / medians['restore']:.2f}"])
    notes = [f"{way}: {what}." for way, what in WAYS.items()]
    notes.append(f"{len(next(iter(result['seconds'].values())))} runs of each, in turn, after one that is not counted.")
    return Section("Restoring a rank", ("", "seconds: median (min–max)", "GiB/s", "of restore's time"), rows, notes)


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    setup = (
        f"* {result['gib']:.3g} GiB: 24 linear layers of width {result['width']} and four times that, with AdamW; two\n"
        "  live holders, one replacement, each in a process with one thread for torch.\n"
    )
    head = page.heading("Restoring a rank", result) + setup + page.measured_in(result) + "\n"
    return head + section(result).markdown()


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of the layers (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=10, help="of each way (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    args = page.parsed(parser, {"width": 16, "runs": 1})
    if min(args.width, args.runs) < 1:
        parser.error("--width and --runs: only numbers above 0")
    known = {**page.provenance("restore.py"), "width": args.width}
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out(
        "restore",
        known,
        lambda: measure(args.width, args.runs),
        lambda result: [section(result)],
        markdown,
        Console(),
        folder,
    )


if __name__ == "__main__":
    sys.exit(main())
