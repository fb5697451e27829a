"""The output files of a run: its folder, log, trace and report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.protocol.controller import JournalEntry
from keepstep.systemcalls import check_locks
from keepstep.trace.record import runfolder
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.targets import check_target, replacing, write_whole
from keepstep.trace.timeline.describe import as_json
from keepstep.trace.timeline.run import opened

if TYPE_CHECKING:
    from keepstep.launcher.log import EventLog


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The files that the launcher writes for a run in addition to its folder."""

    report: Path | None = None
    log_json: Path | None = None
    """File to which the launcher appends events as lines of JSON; ``-`` is the standard error."""
    trace: Path | None = None
    """A trace of the run, for Perfetto."""


def add_output_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of `Outputs`."""
    parser.add_argument("--report", help="write a JSON report of the run to this file")
    parser.add_argument("--trace", help="write a trace of the run to this file, for Perfetto or chrome://tracing")
    parser.add_argument(
        "--log-json", metavar="FILE", help="append a line of JSON for each event of the job; - is the standard error"
    )


def outputs_of(arguments: argparse.Namespace) -> Outputs:
    """Returns the output files that the flags name.

    Raises:
        ConfigurationError: a file cannot be written.
    """
    return Outputs(
        report=_file("--report", arguments.report),
        trace=_file("--trace", arguments.trace),
        log_json=_log(arguments.log_json),
    )


def _file(flag: str, name: str | None) -> Path | None:
    """Returns the path of an output file, which need not exist yet."""
    if not name:
        return None
    return check_target(flag, Path(name))


def _log(name: str | None) -> Path | None:
    """Returns the path of the log, or ``-``. If the file exists, its folder need not be writable."""
    if name == "-" or (name and Path(name).exists() and not Path(name).is_dir()):
        return Path(name)
    return _file("--log-json", name)


def make_folder(flag: str, path: Path, mode: int = 0o777) -> Path:
    """Creates the folder that ``flag`` names, if it does not exist, and returns it.

    Args:
        flag, path: the flag and its value.
        mode: of a new folder. Without access for others, an existing folder must be this user's, and writable by no
            other: who can write there can take the run over.

    Raises:
        ConfigurationError: it cannot be created, is not writable, others can write there, or has no locks (without
            access for others, which is a run's).
    """
    is_there = path.exists()
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from error
    is_others = found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022
    if is_there and is_others and not mode & 0o077:
        raise ConfigurationError(
            f"{flag} {path}: it must belong to this user, and no other user may write in it (chmod go-w), because who "
            "can write there can take the run over; or name a folder below it, which is created"
        )
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"{flag} {path}: not writable")
    return path if mode & 0o077 else check_locks(path)


def record_run(
    run_dir: Path,
    info: runfolder.RunInfo,
    outputs: Outputs,
    run: Callable[[Recorder], dict[str, Any]],
    lived_through: list[JournalEntry] | None = None,
    *,
    is_durable: bool = False,
    is_continuable: bool = False,
    is_displacing: bool = False,
) -> dict[str, Any]:
    """Runs a job, records it in its folder, and returns its report, with ``exit_code`` and ``reason``.

    Args:
        run_dir: the folder. Files of an earlier run in it are moved aside.
        info: description of the run.
        outputs: further files to write.
        run: runs the job to its end. It must write the journal to the given recorder.
        lived_through: journal entries of this run from an earlier process, which the folder holds; None: the run begins
            now.
        is_durable, is_continuable: as for `Recorder`.
        is_displacing: as for `keepstep.trace.record.runfolder.occupied`.

    Raises:
        ConfigurationError: another job runs in the folder, or a file cannot be written.
    """
    occupied = runfolder.occupied(run_dir, is_displacing=is_displacing)
    with occupied, _event_log(outputs.log_json, info) as log:
        if lived_through is None:
            runfolder.begin(run_dir, info)
        else:
            runfolder.write(run_dir, info)
            if log is not None:
                log.caught_up(lived_through)
        listener = log.decided if log else None
        with Recorder(run_dir, listener, is_durable=is_durable, is_continuable=is_continuable) as recorder:
            result = run(recorder)
        at_ns = info.clock().now_ns()
        with _observing("the end of the run is not recorded"):
            runfolder.end(run_dir, info, result["exit_code"], result["reason"], at_ns)
        if log is not None:
            log.ended(result["exit_code"], result["reason"], at_ns)
        if outputs.trace is not None:
            write_trace(run_dir, outputs.trace)
    if outputs.report is not None:
        with _observing("no report was written"):
            write_whole(outputs.report, as_json(result))
    return result


@contextlib.contextmanager
def _observing(what: str) -> Iterator[None]:
    """Prints an error of the block and does not raise it: the job's result stays."""
    try:
        yield
    except (OSError, KeepstepError) as error:
        print(f"keepstep: {what}: {error}", file=sys.stderr, flush=True)


def write_trace(run_dir: Path, target: Path) -> None:
    """Writes the trace of the run in a folder. It prints errors and does not raise them: the job's result stays."""
    from keepstep.trace import perfetto  # here, because most jobs do not need it

    with _observing("no trace was written"), opened(run_dir) as run, replacing(target) as file:
        perfetto.write_trace(run, file)


def _event_log(path: Path | None, info: runfolder.RunInfo) -> contextlib.AbstractContextManager[EventLog | None]:
    if path is None:
        return contextlib.nullcontext()
    from keepstep.launcher.log import EventLog  # here, because most jobs do not need it

    return EventLog(path, info)
