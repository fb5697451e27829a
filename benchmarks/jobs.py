"""Starts jobs for benchmarks, reads their event files, and ends all of their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from keepstep.config import ALLOCATOR_VARIABLES

WORKER = Path(__file__).resolve().parent / "train_plain.py"
POLL_S = 0.01
END_DEADLINE_S = 20.0


class JobFailed(RuntimeError):
    """A job has failed. The message ends with the last lines of its output."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The training of all jobs of a benchmark."""

    size: str
    batch_size: int
    world_size: int
    seed: int
    deadline_s: float
    """Limit for each wait."""

    def worker_arguments(self, events: Path, *more: str) -> list[str]:
        """Returns the worker script and its arguments."""
        own = ["--events", str(events), "--size", self.size, "--batch-size", str(self.batch_size)]
        return [str(WORKER), *own, "--seed", str(self.seed), *more]

    def torchrun(self, worker: list[str], max_restarts: int = 0) -> list[str]:
        """Returns the command line under torchrun."""
        flags = ["--standalone", "--nproc-per-node", str(self.world_size), "--max-restarts", str(max_restarts)]
        return [sys.executable, "-m", "torch.distributed.run", *flags, *worker]

    def keepstep(self, worker: list[str]) -> list[str]:
        """Returns the command line under keepstep, with one spare."""
        flags = ["--nproc-per-node", str(self.world_size), "--spares", "1", "--between-steps", str(self.deadline_s)]
        return [sys.executable, "-m", "keepstep.cli.main", "run", *flags, *worker, "--keepstep"]


@dataclasses.dataclass(frozen=True)
class Event:
    """One line of an event file; see `benchmarks/train_plain.py`."""

    rank: int
    attempt: int
    what: str
    value: float
    at_s: float
    cpu_s: float


def read_events(folder: Path) -> list[Event]:
    """Returns all events so far, ordered by time. An incomplete line is left out."""
    found = []
    for path in folder.glob("events-*"):
        rank = int(path.name.rpartition("-")[2])
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                attempt, what, value, at, cpu = line.split()
                found.append(Event(rank, int(attempt), what, float(value), float(at), float(cpu)))
    return sorted(found, key=lambda event: event.at_s)


def step_intervals_s(events: list[Event], rank: int = 0, after_step: int = 0) -> list[float]:
    """Returns the times between the ends of two consecutive steps on one rank, without a restart or recovery between.

    Args:
        events: as `read_events` returns them.
        rank: the rank. Ranks wait for each other in every step, so one is enough.
        after_step: the first step whose time counts.
    """
    steps = [event for event in events if event.rank == rank and event.what == "step"]
    return [
        after.at_s - before.at_s
        for before, after in itertools.pairwise(steps)
        if after.attempt == before.attempt and after.value == before.value + 1 and after.value >= after_step
    ]


def median_step_s(events: list[Event], after_step: int = 0) -> float:
    """Returns the median of `step_intervals_s`; NaN if there is none."""
    intervals = step_intervals_s(events, after_step=after_step)
    return statistics.median(intervals) if intervals else float("nan")


class RunningJob:
    """A command in a separate process, which this one watches and ends. Use it in a ``with`` block."""

    def __init__(self, command: list[str], folder: Path, *, keeps_memory: bool = True) -> None:
        """Args:
        command: the command line.
        folder: its folder for temporary files and its output.
        keeps_memory: set `ALLOCATOR_VARIABLES`, as keepstep does for its workers. Without them, chance decides which
            of two jobs returns memory to the system in each step, and they cannot be compared.
        """
        self.folder = folder
        self._log = folder / "output.log"
        environment = dict(os.environ)  # environ: the job inherits it
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(folder)}
        environment |= ALLOCATOR_VARIABLES if keeps_memory else {}
        with self._log.open("ab") as log:
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends the job and everything that it started."""
        family = self.family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(psutil.TimeoutExpired):
                self._process.wait(END_DEADLINE_S)
        self._kill(family)

    def kill(self) -> None:
        """Kills the job at once, when all of its output is complete."""
        self._kill(self.family())

    def family(self) -> list[psutil.Process]:
        """Returns the command's process, and all that it has started."""
        family = [self._process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += self._process.children(recursive=True)
        return family

    def _kill(self, family: list[psutil.Process]) -> None:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, END_DEADLINE_S)

    def cpu_now_s(self) -> float:
        """Returns the processor time of the command's own process so far, without its workers."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def check_alive(self, what: str) -> None:
        """Raises:
        JobFailed: the job has ended before ``what``.
        """
        if self._process.poll() is not None:
            raise self.failure(f"the job ended with exit code {self._process.returncode} before {what}")

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Waits for a condition while the job runs.

        Raises:
            JobFailed: the job has ended, or the deadline has passed.
        """
        end_s = time.monotonic() + deadline_s
        while not condition():
            self.check_alive(what)
            if time.monotonic() > end_s:
                raise self.failure(f"{what}: not within {deadline_s:g} s")
            time.sleep(POLL_S)

    def wait(self, deadline_s: float, exit_code: int = 0) -> None:
        """Waits until the job has ended, with this exit code.

        Raises:
            JobFailed: it has another one, or the deadline has passed.
        """
        end_s = time.monotonic() + deadline_s
        while self._process.poll() is None:
            if time.monotonic() > end_s:
                raise self.failure(f"the job did not end within {deadline_s:g} s")
            time.sleep(POLL_S)
        if self._process.returncode != exit_code:
            raise self.failure(f"the job ended with exit code {self._process.returncode}")

    def output(self) -> str:
        """Returns what it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def failure(self, text: str) -> JobFailed:
        """Returns an error with the last lines of the job's output."""
        return JobFailed(f"{text}\n{tail(self._log)}")


def tail(path: Path, num_lines: int = 25) -> str:
    """Returns the last lines of a file, indented; empty if there is no file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    except OSError:
        return ""
    return "\n".join(f"    | {line}" for line in lines)


@contextlib.contextmanager
def pipes(folder: Path, names: list[str]) -> Iterator[dict[str, int]]:
    """Makes named pipes that both sides may open at any time. Yields name -> descriptor."""
    opened: dict[str, int] = {}
    try:
        for name in names:
            os.mkfifo(folder / name, 0o600)
            opened[name] = os.open(folder / name, os.O_RDWR)
        yield opened
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
