"""A function as the ranks of a small job: real processes, real gloo, and a deadline for all of it.

The processes come from multiprocessing's fork server, which has imported torch and has no threads, so one is there
within milliseconds and inherits nothing from the test's own process.
"""

import faulthandler
import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.groups.registry import GroupRegistry

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["torch._dynamo", "hypothesis", "pytest", "keepstep.worker.session", "tests.worker.frozen"]
CONTEXT.set_forkserver_preload(PRELOAD)
DEADLINE_S = 60.0
"""For the whole of a test's processes; it ends a test that hangs and is no measure of anything."""


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, silent: frozenset[int] = frozenset()
) -> list[Any]:
    """Runs ``function(rank, num_ranks, *arguments)`` in as many processes and returns what each returned.

    No process leaves before all have answered, so none loses the last bytes of another. All of them are gone when
    this returns, stopped ones too.

    Args:
        num_ranks: how many processes.
        function: importable by its name.
        arguments: for every rank.
        silent: ranks that stop or die in the test: no process waits for their answer, which is None.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not answer in time.
    """
    processes, ends = [], {}
    for rank in range(num_ranks):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_rank, args=(theirs, function, rank, num_ranks, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends[ours] = rank
    try:
        return _answers(ends, silent)
    finally:
        for end in ends:
            with suppress(OSError):
                end.send(None)
        for rank, process in enumerate(processes):
            process.join(0.0 if rank in silent else 1.0)
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()


def _answers(ends: dict[Connection, int], silent: frozenset[int]) -> list[Any]:
    answers: dict[int, Any] = dict.fromkeys(silent)
    until = time.monotonic() + DEADLINE_S
    while len(answers) < len(ends):
        pending = [end for end, rank in ends.items() if rank not in answers]
        ready = wait(pending, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {[ends[end] for end in pending]} did not answer within {DEADLINE_S:g} s")
        for end in ready:
            try:
                good, value = end.recv()
            except EOFError:
                raise AssertionError(f"rank {ends[end]} died without an answer") from None
            assert good, f"rank {ends[end]}:\n{value}"
            answers[ends[end]] = value
    return [answers[rank] for rank in range(len(ends))]


def _rank(end: Connection, function: Callable[..., Any], rank: int, num_ranks: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(DEADLINE_S - 3.0)  # where a rank hangs
    try:
        answer = (True, function(rank, num_ranks, *arguments))
    except BaseException:  # whatever it was is shown by the test
        answer = (False, traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    with suppress(OSError):
        end.send(answer)
        end.recv()
    os._exit(0)


class Watcher:
    """A group's observer that counts. ``echoes``: what `failed` answers; ``knows``: what `knows_failure` answers."""

    def __init__(self, echoes: bool = True, knows: bool = False) -> None:
        self.echoes, self.knows = echoes, knows
        self.last_over = 0
        self.num_entered = self.num_left = self.num_echoed = self.num_missing = 0
        self.num_awaited = self.num_came = 0
        self.operations: list[tuple[str, Operation, int]] = []
        self.errors: list[str] = []

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        self.num_entered += 1
        self.operations.append((group, operation, peer))

    def awaited(self) -> None:
        self.num_awaited += 1

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        self.num_left += 1
        self.num_came += was_awaited

    def failed(self, group: str, error: Exception) -> bool:
        self.errors.append(f"{group}: {error}")
        return self.echoes

    def is_over(self, generation: int) -> bool:
        return generation <= self.last_over

    def knows_failure(self, within_s: float) -> bool:
        return self.knows

    def echoed(self, group: str) -> None:
        self.num_echoed += 1

    def missing(self, group: str, received: object, *, is_decided: bool = False) -> None:
        self.num_missing += 1


@functools.cache
def _file(path: Path) -> dist.Store:
    """Kept open: the last process to close the file removes it, even when another one is just about to open it."""
    store = dist.FileStore(str(path / "store"))
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    return store


def file_store(path: Path, generation: int = 1, name: str = "world") -> dist.Store:
    """A store of one generation and group, in a file that all ranks can reach."""
    return dist.PrefixStore(f"{generation}/{name}", _file(path))


def meet(path: Path, num_ranks: int, name: str) -> None:
    """Waits until all ranks are here, without a word over their groups."""
    store = file_store(path, name=f"meet/{name}")
    if store.add("here", 1) == num_ranks:
        store.set("all", b"")
    store.wait(["all"])


def registry_of(path: Path, num_ranks: int, watcher: Watcher) -> GroupRegistry:
    """A registry whose groups find each other in `file_store`."""
    return GroupRegistry(lambda generation, name: file_store(path, generation, name), watcher)


def join(path: Path, rank: int, num_ranks: int, watcher: Watcher | None = None) -> tuple[GroupRegistry, SurvivingGroup]:
    """Makes the surviving world group torch's default group, connected in generation 1."""
    registry = registry_of(path, num_ranks, watcher or Watcher())
    world = registry.join_world(rank, num_ranks, lambda: rank)
    registry.connect(1, rank)
    return registry, world


def plain_gloo(path: Path, rank: int, num_ranks: int, generation: int = 1, timeout_s: float = 10 * DEADLINE_S) -> Any:
    """A gloo group of torch itself, as keepstep has it inside. What waits for its usual deadline has hung."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(file_store(path, generation), rank, num_ranks, options)
