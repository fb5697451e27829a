"""Runs many seeds on all cores: one process per core, which reports its results as lines of JSON."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Thread
from typing import IO

import msgspec

from keepstep.errors import PeerLost
from keepstep.programs import ending, own_command
from keepstep.sim.run import case_of, run

REPORT_EVERY_S = 1.0


class FailedSeed(msgspec.Struct, frozen=True):
    """A seed that failed."""

    seed: int
    check: str
    detail: str


class Tally(msgspec.Struct):
    """The added results of some seeds."""

    num_seeds: int = 0
    num_failures: int = 0
    """Faults that have hit a process, a node or the controller."""
    num_recoveries: int = 0
    num_events: int = 0
    virtual_s: float = 0.0
    next_seed: int = 0
    failed: list[FailedSeed] = msgspec.field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds the results of other seeds."""
        self.num_seeds += other.num_seeds
        self.num_failures += other.num_failures
        self.num_recoveries += other.num_recoveries
        self.num_events += other.num_events
        self.virtual_s += other.virtual_s
        self.next_seed = max(self.next_seed, other.next_seed)
        self.failed += other.failed


def run_seeds(first: int, end: int | None, stride: int, seconds: float | None) -> Iterator[Tally]:
    """Runs seeds, and yields the tally of those since the last one about once a second.

    Args:
        first: the first seed. The others are ``first + stride``, ``first + 2 * stride``, ...
        end: the end of the range of seeds; None: no end.
        stride: distance between two seeds.
        seconds: no seed begins after this time; None: no limit.
    """
    begun_s = reported_s = time.monotonic()
    tally, seed = Tally(), first
    while (end is None or seed < end) and (seconds is None or time.monotonic() < begun_s + seconds):
        _count(tally, seed)
        seed += stride
        if time.monotonic() > reported_s + REPORT_EVERY_S:
            reported_s = time.monotonic()
            yield tally
            tally = Tally()
    yield tally


def _count(tally: Tally, seed: int) -> None:
    outcome = run(case_of(seed))
    tally.num_seeds += 1
    tally.num_failures += outcome.num_failures
    tally.num_recoveries += outcome.num_recoveries
    tally.num_events += outcome.num_events
    tally.virtual_s += outcome.virtual_s
    tally.next_seed = seed + 1
    if outcome.check is not None:
        tally.failed.append(FailedSeed(seed, outcome.check, outcome.detail))


def run_on_all_cores(first: int, end: int | None, jobs: int, seconds: float | None) -> Iterator[Tally]:
    """Runs ``first``, ``first + 1``, ... on several processes, and yields the tallies of all as they arrive.

    Args:
        first: the first seed.
        end: the end of the range of seeds; None: no end.
        jobs: number of processes. If there are fewer seeds, there is one process per seed.
        seconds: no seed begins after this time; None: no limit.

    Raises:
        PeerLost: a process ended with another exit code than 0.
    """
    decoder = msgspec.json.Decoder(Tally)
    with ExitStack() as stack:
        children = []
        for job in range(jobs if end is None else min(jobs, end - first)):
            command = own_command("keepstep.cli.main", "simulate", "--from", str(first + job), "--stride", str(jobs))
            command += ["--json-lines"]
            command += [] if end is None else ["--seeds", str(end - first - job)]
            command += [] if seconds is None else ["--seconds", str(seconds)]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(child.kill)
            children.append(child)
        lines: SimpleQueue[bytes | None] = SimpleQueue()
        for child in children:
            assert child.stdout is not None
            Thread(target=_pass_on, args=(child.stdout, lines), daemon=True).start()
        for _ in children:
            while (line := lines.get()) is not None:
                yield decoder.decode(line)
        for child in children:
            if child.wait() != 0:
                raise PeerLost(f"a process of the simulation has ended: {ending(child.returncode)}")


def _pass_on(stream: IO[bytes], lines: SimpleQueue[bytes | None]) -> None:
    """Puts each line into the queue at once, because a process blocks while its pipe is full. At the end puts None."""
    for line in stream:
        lines.put(line)
    lines.put(None)
