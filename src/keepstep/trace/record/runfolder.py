"""A run's folder: its files, its lock, and the files of earlier runs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from keepstep.errors import ConfigurationError
from keepstep.protocol.recovery import RecoverySettings
from keepstep.trace.record.jobclock import JobClock, this_machine
from keepstep.trace.targets import write_whole

INFO = "run.json"
JOURNAL = "journal.jsonl"
PHASES = "phases"
START_UP = "start-up"
STORE = "store"
WEIGHTS = "weights.json"
_LOCK = "run.lock"
_EARLIER = "earlier-{}"


class Ended(msgspec.Struct, frozen=True):
    """How a run ended. ``at_ns`` is on the job's clock."""

    exit_code: int
    reason: str
    at_ns: int


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run from its start on; `run.json`."""

    run: str
    """Random: two runs in one folder, one after the other, are told apart by it."""
    command: tuple[str, ...]
    version: str
    node: str
    pid: int
    settings: RecoverySettings
    started_ns: int
    """On the job's clock (`keepstep.trace.record.jobclock`), as all times of the journal and of the log of phases."""
    started_unix_ns: int
    """The same moment on the clock on the wall."""
    machine: str = ""
    """Whose monotonic clock the job's present controller reads."""
    clock_offset_ns: int = 0
    """What that controller adds to it to get the job's clock."""
    ended: Ended | None = None

    def unix_ns(self, at_s: float) -> int:
        """A time of the journal or of the log of phases, on the clock on the wall as it went when the run began."""
        return self.started_unix_ns + round(at_s * 1e9) - self.started_ns

    def clock(self, last_s: float | None = None) -> JobClock:
        """The job's clock, as well as this machine can know it.

        Args:
            last_s: the time of the last entry of the journal, for a controller that continues from there.
        """
        offset_ns = self.clock_offset_ns
        if self.machine != this_machine():
            offset_ns = self.started_ns + (time.time_ns() - self.started_unix_ns) - time.monotonic_ns()
        if last_s is not None:
            offset_ns = max(offset_ns, round(last_s * 1e9) + 1 - time.monotonic_ns())
        return JobClock(offset_ns)


def new_run(command: tuple[str, ...], node: str, settings: RecoverySettings) -> RunInfo:
    """The metadata of a run that starts now."""
    return RunInfo(
        run=secrets.token_hex(6),
        command=command,
        version=importlib.metadata.version("keepstep"),
        node=node,
        pid=os.getpid(),
        settings=settings,
        started_ns=time.monotonic_ns(),
        started_unix_ns=time.time_ns(),
        machine=this_machine(),
    )


def goes_on(info: RunInfo, node: str, last_s: float | None) -> RunInfo:
    """The metadata of a run whose controller is this process from now on.

    Args:
        info: what was known of it before.
        node: the name of this machine.
        last_s: the time of the last entry of its journal, None if that is empty.
    """
    offset_ns = info.clock(last_s).offset_ns
    return msgspec.structs.replace(
        info, node=node, pid=os.getpid(), machine=this_machine(), clock_offset_ns=offset_ns, ended=None
    )


@contextlib.contextmanager
def occupied(folder: Path, *, is_displacing: bool = False) -> Iterator[None]:
    """Holds a folder for one job, for as long as its process lives.

    Args:
        folder: of the run.
        is_displacing: the process that holds it has lost the run's lease to this one, and may be stopped or on
            another machine: the lock is replaced together with its file.

    Raises:
        ConfigurationError: another job runs there.
    """
    lock = folder / _LOCK
    name = f"{_LOCK}.{secrets.token_hex(4)}" if is_displacing else _LOCK
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"--run-dir {folder}: another job is running there; name another folder") from None
        if is_displacing:
            (folder / name).replace(lock)
        yield
    finally:
        os.close(descriptor)


def is_occupied(folder: Path) -> bool:
    """Whether a job runs in a folder."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def begin(folder: Path, info: RunInfo) -> None:
    """A run begins in a folder that is occupied for it. What an earlier one left there is moved aside."""
    if (folder / INFO).exists() or (folder / JOURNAL).exists():
        move_aside(folder, (INFO, JOURNAL, PHASES, START_UP, STORE, WEIGHTS))
    write(folder, info)


def move_aside(folder: Path, names: Sequence[str]) -> None:
    """Moves what an earlier run left under some names into a fresh folder next to it; nothing if nothing is there."""
    there = [name for name in names if (folder / name).exists()]
    if there:
        number = next(n for n in range(1, 1 << 30) if not (folder / _EARLIER.format(n)).exists())
        aside = folder / _EARLIER.format(number)
        aside.mkdir(0o700)
        for name in there:
            (folder / name).rename(aside / name)


def write(folder: Path, info: RunInfo) -> None:
    """Writes `run.json`, whole or not at all."""
    write_whole(folder / INFO, msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")


def end(folder: Path, info: RunInfo, exit_code: int, reason: str, at_ns: int) -> None:
    """The run has ended, at a time of the controller's monotonic clock."""
    write(folder, msgspec.structs.replace(info, ended=Ended(exit_code, reason, at_ns)))


def read_info(folder: Path) -> RunInfo:
    """What is known of the run in a folder.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    path = folder / INFO
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise ConfigurationError(f"{folder}: no run is recorded there ({INFO}: {error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not what keepstep writes: {error}") from error


def newest_run(folder: Path) -> Path:
    """The folder itself if a run is recorded in it, else of its sub-folders the one whose run began last.

    A drill has two runs in one folder, one after the other.

    Raises:
        ConfigurationError: there is none.
    """
    if (folder / INFO).exists():
        return folder
    below = [path.parent for path in folder.glob(f"*/{INFO}")] if folder.is_dir() else []
    if not below:
        raise ConfigurationError(f"{folder}: no run is recorded there (no {INFO})")
    return max(below, key=lambda path: read_info(path).started_ns)
