"""Runs a job of `benchmarks/peers.py`, injects one fault, and evaluates the event files after it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from jobs import Event, Workload, median_step_s, read_events, tail
from peers_systems import CHECKPOINT_EVERY, Process, System, environment

POLL_S = 0.05
END_DEADLINE_S = 5.0
SETTLED_STEPS = 3
"""Least number of steps between a recovery and the next fault."""


class Lost(RuntimeError):
    """The job has ended, or has passed a deadline. The message says which."""


class PeerJob:
    """A job under one of the systems. Use it in a ``with`` block, which ends all of its processes."""

    def __init__(self, system: System, workload: Workload, folder: Path) -> None:
        self.folder, self._log, self._workload = folder, folder / "output.log", workload
        self._processes = [self._start(process) for process in system.start(workload, folder)]

    def _start(self, process: Process) -> psutil.Popen:
        with self._log.open("ab") as log:
            return psutil.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.folder, process),
                cwd=self.folder,
                start_new_session=True,
            )

    def __enter__(self) -> PeerJob:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(self._processes, END_DEADLINE_S)
        family = self._family()  # NVRx's monitors are no children of the job; their environment identifies it
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([*family, *self._processes], END_DEADLINE_S)

    def _family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("TMPDIR") == str(self.folder):
                    found.append(process)
        return found

    def events(self) -> list[Event]:
        """Returns all events so far."""
        return read_events(self.folder)

    def workers(self) -> dict[int, int]:
        """Returns rank -> process id, from the events of each rank's newest process."""
        return {event.rank: int(event.value) for event in self.events() if event.what == "start"}

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Waits while a process of the job runs.

        Raises:
            Lost: all have ended, or the deadline has passed.
        """
        end_s = time.monotonic() + deadline_s
        while not condition():
            if all(process.poll() is not None for process in self._processes):
                raise Lost(f"the job ended before {what}")
            if time.monotonic() > end_s:
                raise Lost(f"{what}: not within {deadline_s:g} s")
            time.sleep(POLL_S)

    def said(self) -> str:
        """Returns the job's output about the error that has ended it."""
        return last_words(tail(self._log, 400))


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The first step after a fault that all ranks of a world have completed.

    Attributes:
        at_s: when the last rank completed it.
        step: its number.
    """

    at_s: float
    step: int


def resumed(events: list[Event], after_attempt: int, smallest_world: int, world_size: int) -> Resumed | None:
    """Returns the first step after a recovery, or None if there is none so far.

    Args:
        events: as `read_events` returns them.
        after_attempt: only steps of later attempts count.
        smallest_world: the least world size that counts.
        world_size: the world size of a rank that has recorded no other.
    """
    worlds: dict[int, int] = {}
    firsts: dict[tuple[int, int], dict[int, Event]] = {}
    for event in events:
        if event.what == "start":
            worlds[event.rank] = world_size
        elif event.what == "world":
            worlds[event.rank] = int(event.value)
        elif event.what == "step" and event.attempt > after_attempt:
            firsts.setdefault((event.attempt, worlds[event.rank]), {}).setdefault(event.rank, event)
    found = []
    for (_, world), by_rank in firsts.items():
        if smallest_world <= world <= len(by_rank):
            in_time = sorted(by_rank.values(), key=lambda event: event.at_s)[:world]
            found.append(Resumed(in_time[-1].at_s, int(min(event.value for event in in_time))))
    return min(found, key=lambda one: one.at_s, default=None)


def has_settled(job: PeerJob, world_size: int) -> bool:
    """Returns whether the whole world has trained some steps since the last recovery, and has written a checkpoint."""
    events = job.events()
    attempt = latest_attempt(events)
    steps: dict[int, list[float]] = {}
    for event in events:
        if event.what == "step" and event.attempt == attempt:
            steps.setdefault(event.rank, []).append(event.value)
    enough = [each for each in steps.values() if len(each) >= SETTLED_STEPS and each[-1] >= CHECKPOINT_EVERY]
    return len(enough) == world_size


def latest_attempt(events: list[Event]) -> int:
    """Returns the number of the newest attempt, generation, iteration or quorum."""
    return max((event.attempt for event in events), default=0)


def strike(job: PeerJob, workload: Workload, sent: signal.Signals, number: int, whole: bool) -> dict[str, Any]:
    """Sends a signal to a random rank at a random time, and returns the cost of this fault.

    Args:
        job: the job.
        workload: its training, and the limit for each wait.
        sent: SIGKILL or SIGSTOP.
        number: the number of the fault. Rank and time depend only on it, so that all systems lose the same rank at the
            same time. Three consecutive faults hit three ranks.
        whole: wait until the whole world trains again.
    """
    seed, world_size = f"{workload.seed} {sent.name}", workload.world_size
    order = random.Random(f"{seed} {number // world_size}").sample(range(world_size), world_size)
    rank, part = order[number % world_size], random.Random(f"{seed} at {number}").random()
    row: dict[str, Any] = {"rank": rank, "outcome": "overcome"}
    survivors: list[int] = []
    try:
        job.wait_until(lambda: has_settled(job, workload.world_size), "it trained", 2 * workload.deadline_s)
        strike_s = time.monotonic() + part * CHECKPOINT_EVERY * median_step_s(job.events(), after_step=3)
        job.wait_until(lambda: time.monotonic() >= strike_s, "the fault", 2 * workload.deadline_s)
        survivors = [pid for other, pid in job.workers().items() if other != rank and other < workload.world_size]
        at_s = time.monotonic()
        os.kill(job.workers()[rank], sent)
        row |= _aftermath(job, workload, rank, at_s, whole)
    except Lost as lost:
        row |= {"outcome": str(lost), "said": job.said()}
    return row | {"survivors": sum(map(_is_alive, survivors))}


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _aftermath(job: PeerJob, workload: Workload, rank: int, at_s: float, whole: bool) -> dict[str, Any]:
    before = [event for event in job.events() if event.at_s <= at_s]
    attempt = latest_attempt(before)

    def first(smallest_world: int) -> Resumed | None:
        return resumed(job.events(), attempt, smallest_world, workload.world_size)

    job.wait_until(lambda: first(1) is not None, "the first step after it", workload.deadline_s)
    one = first(1)
    assert one is not None
    in_step = max(event.value for event in before if event.what == "step" and event.rank == rank) + 1
    row = {
        "step_ms": round(median_step_s(before, after_step=3) * 1000, 3),
        "gap_ms": round((one.at_s - at_s) * 1000, 3),
        "steps_again": int(in_step) + 1 - one.step,
    }
    row["recovery_ms"] = round(row["gap_ms"] - row["step_ms"], 3)
    if row["steps_again"] > CHECKPOINT_EVERY + 1:
        raise Lost(f"it went on from step {one.step}")
    if whole:
        job.wait_until(lambda: first(workload.world_size) is not None, "the whole world trained", workload.deadline_s)
        all_again = first(workload.world_size)
        assert all_again is not None
        row["whole_ms"] = round((all_again.at_s - at_s) * 1000, 3)
    return row


def digests(events: list[Event]) -> dict[int, set[int]]:
    """Returns step -> the hashes of the parameters that ranks of the newest attempt recorded after it; one if equal."""
    found: dict[int, set[int]] = {}
    steps: dict[int, int] = {}
    attempt = latest_attempt(events)
    for event in events:
        if event.what == "step":
            steps[event.rank] = int(event.value)
        elif event.what == "digest" and event.attempt == attempt:
            found.setdefault(steps[event.rank], set()).add(int(event.value))
    return found


def last_words(said: str) -> str:
    """Returns the last line of an output that contains an error, or else its last line."""
    lines = [line.strip(" |") for line in said.splitlines() if line.strip(" |")]
    errors = [line for line in lines if re.search(r"\w(Error|Exception|Aborted)\b|ERROR|panicked", line)]
    return f"`{(errors or lines or ['nothing'])[-1][:160].replace('`', '')}`"
