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
from keepstep.protocol.messages import printable
from keepstep.protocol.recovery import RecoverySettings
from keepstep.systemcalls import lock
from keepstep.trace.record.jobclock import JobClock, this_machine
from keepstep.trace.targets import write_whole

INFO = "run.json"
JOURNAL = "journal.jsonl"
PHASES = "phases"
START_UP = "start-up"
STORE = "store"
WEIGHTS = "weights.json"
FORMAT = 2
"""The form of a run's files. It is raised when an older version would misread a newer file, or the other way round."""
_LOCK = "run.lock"
_EARLIER = "earlier-{}"


class Ended(msgspec.Struct, frozen=True):
    """How a run ended. ``at_ns`` is on the job's clock."""

    exit_code: int
    reason: str
    at_ns: int


class _Written(msgspec.Struct, frozen=True):
    """What `run.json` says in every format. Before formats had numbers, it was without one."""

    version: str
    format: int = 0


class RunInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata of a run, in `run.json`."""

    format: int
    """`FORMAT` of the version that has written the files of the folder."""
    run: str
    """Random identifier, which distinguishes successive runs in one folder."""
    command: tuple[str, ...]
    version: str
    """Version of keepstep of the current controller. It gives the same orders as the versions before it have given."""
    node: str
    pid: int
    settings: RecoverySettings
    started_ns: int
    """Start on the job's clock (`keepstep.trace.record.jobclock`), like all times of the journal and the phase log."""
    started_unix_ns: int
    """Start in Unix time."""
    machine: str
    """Identifies the monotonic clock of the current controller; see `this_machine`."""
    clock_offset_ns: int
    """The current controller adds this to its monotonic clock to get the job's clock."""
    ended: Ended | None = None

    def unix_ns(self, at_s: float) -> int:
        """Converts a time of the journal or the phase log, in seconds, to Unix time as it was at the run's start."""
        return self.started_unix_ns + round(at_s * 1e9) - self.started_ns

    def clock(self, last_s: float | None = None) -> JobClock:
        """Returns the job's clock. On another machine, or after a reboot, it is derived from the wall clock.

        Args:
            last_s: the time of the journal's last entry, for a controller that continues the run. The clock is after
                it.
        """
        offset_ns = self.clock_offset_ns
        if self.machine != this_machine():
            offset_ns = self.started_ns + (time.time_ns() - self.started_unix_ns) - time.monotonic_ns()
        if last_s is not None:
            offset_ns = max(offset_ns, round(last_s * 1e9) + 1 - time.monotonic_ns())
        return JobClock(offset_ns)


def new_run(command: tuple[str, ...], node: str, settings: RecoverySettings) -> RunInfo:
    """Returns the metadata of a run that starts now."""
    return RunInfo(
        format=FORMAT,
        run=secrets.token_hex(6),
        command=command,
        version=own_version(),
        node=node,
        pid=os.getpid(),
        settings=settings,
        started_ns=time.monotonic_ns(),
        started_unix_ns=time.time_ns(),
        machine=this_machine(),
        clock_offset_ns=0,
    )


def own_version() -> str:
    """Returns the version of keepstep that runs here."""
    return importlib.metadata.version("keepstep")


def goes_on(info: RunInfo, node: str, last_s: float | None) -> RunInfo:
    """Returns the metadata of a run that this process continues as its controller.

    Args:
        info: the metadata so far.
        node: the name of this machine.
        last_s: the time of the journal's last entry; None if it is empty.
    """
    offset_ns = info.clock(last_s).offset_ns
    return msgspec.structs.replace(
        info,
        version=own_version(),
        node=node,
        pid=os.getpid(),
        machine=this_machine(),
        clock_offset_ns=offset_ns,
        ended=None,
    )


@contextlib.contextmanager
def occupied(folder: Path, *, is_displacing: bool = False) -> Iterator[None]:
    """Locks a folder for one job until the block exits or the process dies.

    Args:
        folder: the folder of the run.
        is_displacing: whether another process, stopped or on another machine, may hold the lock after it has lost the
            run's lease to this one. Then the lock file is replaced.

    Raises:
        ConfigurationError: another job holds the lock, or the file system has no locks.
    """
    path = folder / _LOCK
    name = f"{_LOCK}.{secrets.token_hex(4)}" if is_displacing else _LOCK
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            lock(descriptor, folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"--run-dir {folder}: another job is running there; name another folder") from None
        if is_displacing:
            (folder / name).replace(path)
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
        lock(descriptor, folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def begin(folder: Path, info: RunInfo) -> None:
    """Writes the metadata of a new run to its locked folder. Moves the files of an earlier run aside."""
    if (folder / INFO).exists() or (folder / JOURNAL).exists():
        move_aside(folder, (INFO, JOURNAL, PHASES, START_UP, STORE, WEIGHTS))
    write(folder, info)


def move_aside(folder: Path, names: Sequence[str]) -> None:
    """Moves an earlier run's files with these names to a new subfolder ``earlier-N``, if there are any."""
    there = [name for name in names if (folder / name).exists()]
    if there:
        number = next(n for n in range(1, 1 << 30) if not (folder / _EARLIER.format(n)).exists())
        aside = folder / _EARLIER.format(number)
        aside.mkdir(0o700)
        for name in there:
            (folder / name).rename(aside / name)


def write(folder: Path, info: RunInfo) -> None:
    """Writes `run.json` atomically."""
    data = msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
    write_whole(folder / INFO, data, is_private=True)


def end(folder: Path, info: RunInfo, exit_code: int, reason: str, at_ns: int) -> None:
    """Records the end of the run in `run.json`. ``at_ns`` is on the job's clock."""
    write(folder, msgspec.structs.replace(info, ended=Ended(exit_code, reason, at_ns)))


def read_info(folder: Path) -> RunInfo:
    """Reads the metadata of the run in a folder.

    Raises:
        ConfigurationError: there is no run, its metadata cannot be read, or its files are in another format.
    """
    path = folder / INFO
    try:
        data = path.read_bytes()
        written = msgspec.json.decode(data, type=_Written)
        if written.format != FORMAT:
            raise ConfigurationError(
                f"{path}: keepstep {printable(written.version)} has recorded this run in format {written.format}, and "
                f"keepstep {own_version()} reads format {FORMAT}: use the version that has recorded it"
            )
        return msgspec.json.decode(data, type=RunInfo)
    except OSError as error:
        raise ConfigurationError(f"{folder}: no run is recorded there ({INFO}: {error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not what keepstep writes: {error}") from error


def other_version(folder: Path, info: RunInfo, error: ConfigurationError) -> str:
    """Returns the sentence that refuses a run whose journal this version replays differently. Its files stay."""
    return (
        f"{folder}: {error}. keepstep {printable(info.version)} has written it, and this is keepstep {own_version()}: "
        "use the version that has written it, or begin a new run, from the newest checkpoint"
    )


def newest_run(folder: Path) -> Path:
    """Returns the folder itself if it contains a run; else its subfolder with the newest run.

    The folder of a drill contains two runs.

    Raises:
        ConfigurationError: there is no run.
    """
    if (folder / INFO).exists():
        return folder
    below = [path.parent for path in folder.glob(f"*/{INFO}")] if folder.is_dir() else []
    if not below:
        raise ConfigurationError(f"{folder}: no run is recorded there (no {INFO})")
    return max(below, key=lambda path: read_info(path).started_ns)
