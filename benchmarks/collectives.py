"""Additional cost of a small collective in keepstep's groups, compared with plain gloo.

    python benchmarks/collectives.py            2 ranks, 10 elements
    python benchmarks/collectives.py --quick    a smoke test

Both groups are in the same processes, and their rounds alternate, so that other load of the machine affects both. For
every operation it prints the median of the rounds' medians in microseconds, the ratio, and the difference.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions, ReduceScatterOptions

from keepstep.protocol.waiting.operations import Operation
from keepstep.shared.tagpage import TagWriter, create
from keepstep.worker.groups.registry import GroupRegistry

NUM_RANKS, ELEMENTS = 2, 10
DEADLINE = timedelta(seconds=60)
CONTEXT = multiprocessing.get_context("spawn")


class Page:
    """A group's observer that writes to the tag page, as a session's observer does without failures."""

    def __init__(self) -> None:
        self._page = TagWriter(create("benchmark"))

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        self._page.operation_entered(group, operation, peer)

    def awaited(self) -> None:
        self._page.operation_awaited()

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        self._page.operation_left(group, operation, peer, was_awaited=was_awaited)

    def failed(self, group: str, error: Exception) -> bool:
        return False

    def knows_failure(self, within_s: float) -> bool:
        return False

    def is_over(self, generation: int) -> bool:
        return False

    def echoed(self, group: str) -> None:
        raise AssertionError(f"group {group} echoed")


@functools.cache
def _file(path: Path) -> dist.Store:
    """Returns a store that stays open: the last process that closes the file removes it, even if another process is
    about to open it."""
    return dist.FileStore(str(path / "store"), NUM_RANKS)


def store(path: Path, name: str) -> dist.Store:
    return dist.PrefixStore(name, _file(path))


def groups(path: Path, rank: int) -> dict[str, dist.ProcessGroup]:
    """Returns a plain gloo group, as keepstep uses it internally, and keepstep's own group."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = DEADLINE
    gloo = dist.ProcessGroupGloo(store(path, "gloo"), rank, NUM_RANKS, options)
    registry = GroupRegistry(lambda generation, name: store(path, f"{generation}/{name}"), Page())
    world = registry.join_world(rank, NUM_RANKS, lambda: rank)
    registry.connect(1, rank)
    return {"gloo": gloo, "keepstep": world}


def operations(rank: int) -> dict[str, Callable[[dist.ProcessGroup], None]]:
    tensor, other, halves = torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(NUM_RANKS * ELEMENTS)
    peer = 1 - rank

    def four_reductions(group: dist.ProcessGroup) -> None:
        works = [group.allreduce([tensor], AllreduceOptions()) for _ in range(4)]
        for work in works:
            work.wait()

    def there_and_back(group: dist.ProcessGroup) -> None:
        if rank == 0:
            group.send([tensor], peer, 0).wait()
            group.recv([tensor], peer, 0).wait()
        else:
            group.recv([tensor], peer, 0).wait()
            group.send([tensor], peer, 0).wait()

    return {
        "all_reduce": lambda group: group.allreduce([tensor], AllreduceOptions()).wait(),
        "broadcast": lambda group: group.broadcast([tensor], BroadcastOptions()).wait(),
        "barrier": lambda group: group.barrier(BarrierOptions()).wait(),
        "4 x all_reduce, then wait": four_reductions,
        "reduce_scatter": lambda group: group._reduce_scatter_base(other, halves, ReduceScatterOptions()).wait(),
        "send and recv, there and back": there_and_back,
    }


def measure(rank: int, path: Path, rounds: int, repeats: int, end: Connection) -> None:
    torch.set_num_threads(1)
    both = groups(path, rank)
    medians: dict[str, dict[str, list[float]]] = {}
    for name, operation in operations(rank).items():
        medians[name] = {which: [] for which in both}
        for _ in range(rounds):
            for which, group in both.items():
                times = []
                for _ in range(repeats):
                    begun = time.perf_counter_ns()
                    operation(group)
                    times.append((time.perf_counter_ns() - begun) / 1000)
                medians[name][which].append(statistics.median(times))
    end.send(medians)
    end.recv()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds, repeats = (1, 5) if arguments.quick else (10, 300)
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(NUM_RANKS):
            ours, theirs = CONTEXT.Pipe()
            CONTEXT.Process(target=measure, args=(rank, Path(folder), rounds, repeats, theirs), daemon=True).start()
            ends.append(ours)
        answers = [end.recv() for end in ends]
        for end in ends:
            end.send(None)
    print(f"{'':32}{'gloo':>9}{'keepstep':>10}{'ratio':>8}{'more':>9}   microseconds, {os.cpu_count()} cores")
    for name, found in answers[0].items():
        gloo, keepstep = (statistics.median(found[which]) for which in ("gloo", "keepstep"))
        print(f"{name:32}{gloo:9.1f}{keepstep:10.1f}{keepstep / gloo:8.2f}{keepstep - gloo:9.1f}")


if __name__ == "__main__":
    main()
