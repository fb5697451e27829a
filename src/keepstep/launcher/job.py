"""Runs one job: checks what was asked for, starts controller and agent, waits, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.agent.agent import Agent
from keepstep.agent.settings import AgentSettings
from keepstep.controller.controller import Controller
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.freememory import free_bytes
from keepstep.launcher import control
from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery import EXIT_FAILED, RecoverySettings
from keepstep.trace.record import runfolder
from keepstep.trace.record.recorder import Listener
from keepstep.trace.targets import replacing, write_whole
from keepstep.trace.timeline.describe import as_json, describe
from keepstep.trace.timeline.run import opened
from keepstep.transports.memory import channel_pair

if TYPE_CHECKING:
    from keepstep.launcher.log import EventLog

LOGS = "logs"
"""Folder of the workers' streams in the run folder, unless another one is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobOptions:
    """A job as the command line describes it."""

    agent: AgentSettings
    recovery: RecoverySettings
    report: Path | None = None
    log_json: Path | None = None
    """Events are appended to it as lines of JSON; ``-`` is the standard error."""
    trace: Path | None = None
    """Where a trace of the run goes, for Perfetto."""
    keep_run_dir: bool = True
    """False for a folder that was made for this job alone; `clear_up` removes it."""

    @property
    def log_dir(self) -> Path:
        """Where the workers' streams go, as far as they go into files."""
        return self.agent.output.log_dir or self.agent.run_dir / LOGS


@dataclasses.dataclass
class Job:
    """A running job, for whoever accompanies it: the drill's injector and its progress display."""

    controller: Controller
    agent: Agent

    def describe(self) -> dict[str, Any]:
        """The report so far, with every worker's place."""
        return describe(self.controller.job, self.agent.status())


Companion = Callable[[Job], Awaitable[None]]


def fresh_run_dir() -> Path:
    """A folder for this run alone, below the system's temporary folder."""
    return Path(tempfile.mkdtemp(prefix="keepstep-"))


def make_folder(flag: str, path: Path, mode: int = 0o777) -> Path:
    """Makes the folder that ``flag`` names, unless it is there, and returns it.

    Raises:
        ConfigurationError: it cannot be made or written.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"{flag} {path}: not writable")
    return path


def run_job(options: JobOptions, companion: Companion | None = None) -> dict[str, Any]:
    """Runs a job to its end and returns its report, with ``exit_code`` and ``reason``.

    SIGINT and SIGTERM end the job; so does an error in ``companion``.

    Raises:
        ConfigurationError: the job cannot be run as asked; nothing is left running.
    """
    run_dir = options.agent.run_dir
    info = runfolder.new_run(options.agent.command, options.agent.node, options.recovery)
    try:
        with runfolder.occupied(run_dir), _event_log(options.log_json, info) as log:
            runfolder.begin(run_dir, info)
            result = asyncio.run(_run(options, companion, log.decided if log else None))
            runfolder.end(run_dir, info, result["exit_code"], result["reason"], time.monotonic_ns())
            if log is not None:
                log.ended(result["exit_code"], result["reason"], time.monotonic_ns())
            if options.trace is not None:
                write_trace(run_dir, options.trace)
    finally:
        clear_up(options)
    if options.report is not None:
        write_whole(options.report, as_json(result))
    return result


def write_trace(run_dir: Path, target: Path) -> None:
    """Writes the trace of the run in a folder. What goes wrong is said, and changes nothing of how the job ended."""
    from keepstep.trace.pictures import chrome  # here, for most jobs do without

    try:
        with opened(run_dir) as run, replacing(target) as file:
            chrome.write_trace(run, file)
    except (OSError, KeepstepError) as error:
        print(f"keepstep: no trace was written: {error}", file=sys.stderr, flush=True)


def _event_log(path: Path | None, info: runfolder.RunInfo) -> contextlib.AbstractContextManager[EventLog | None]:
    if path is None:
        return contextlib.nullcontext()
    from keepstep.launcher.log import EventLog  # here, for most jobs do without what it needs

    return EventLog(path, info)


def clear_up(options: JobOptions) -> None:
    """Removes a run folder that is not to be kept, unless logs of its workers lie in it."""
    run_dir = options.agent.run_dir
    if not options.keep_run_dir and not (run_dir / LOGS).exists():
        shutil.rmtree(run_dir, ignore_errors=True)


async def _run(options: JobOptions, companion: Companion | None, listener: Listener | None) -> dict[str, Any]:
    ours, theirs = channel_pair()
    run_dir = options.agent.run_dir
    controller = Controller(options.recovery, ours, run_dir, listener)
    output = dataclasses.replace(options.agent.output, log_dir=options.log_dir)
    agent = Agent(dataclasses.replace(options.agent, output=output), theirs)
    job = Job(controller, agent)
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, stopped, number)
    try:
        starting = asyncio.create_task(agent.start())
        first: list[asyncio.Future[Any]] = [starting, stopped]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            check_memory(options, starting.result().worker_bytes)
            async with control.serve(run_dir, job.describe):
                await _accompany(controller, agent, stopped, companion(job) if companion else None)
    finally:
        await agent.stop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    if controller.job.ended is None:
        controller.job.ended = _unfinished(agent, stopped)
    return describe(controller.job)


async def _accompany(
    controller: Controller, agent: Agent, stopped: asyncio.Future[int], companion: Awaitable[None] | None
) -> None:
    """Runs both programs until the controller has ended the job, the agent has, or a signal came."""
    deciding = asyncio.create_task(controller.run())
    serving = asyncio.create_task(agent.run())
    waited: set[asyncio.Future[Any]] = {deciding, serving, stopped}
    helper = asyncio.ensure_future(companion) if companion is not None else None
    try:
        while not (deciding.done() or serving.done() or stopped.done()):
            await asyncio.wait(waited | ({helper} if helper else set()), return_when=asyncio.FIRST_COMPLETED)
            if helper is not None and helper.done():
                helper.result()
                helper = None
        if deciding.done():
            deciding.result()
            await serving
        elif serving.done():
            serving.result()
    finally:
        for task in (deciding, serving, *([helper] if helper else [])):
            task.cancel()
        await asyncio.gather(deciding, serving, return_exceptions=True)


def _on_signal(stopped: asyncio.Future[int], number: int) -> None:
    if not stopped.done():
        stopped.set_result(number)


def _unfinished(agent: Agent, stopped: asyncio.Future[int]) -> EndJob:
    if stopped.done():
        number = stopped.result()
        return EndJob(128 + number, f"ended by {signal.Signals(number).name}")
    if agent.lost_spawner:
        return EndJob(EXIT_FAILED, "the process that starts workers died, and its workers with it")
    return EndJob(EXIT_FAILED, "the agent ended before the job did")


def check_memory(options: JobOptions, worker_bytes: int) -> None:
    """Refuses more processes than can possibly fit.

    Args:
        options: the job.
        worker_bytes: what one worker takes before its script has begun, as the spawner measured it.

    Raises:
        ConfigurationError: naming what was asked for and how many would fit.
    """
    count = options.recovery.world_size + options.recovery.num_spares
    available = free_bytes()
    if worker_bytes and count * worker_bytes > available:
        raise ConfigurationError(
            f"--nproc-per-node {options.recovery.world_size} with --spares {options.recovery.num_spares}: {count} "
            f"processes need at least {worker_bytes / 2**20:.0f} MiB each, and {available / 2**30:.1f} GiB are free: "
            f"at most {available // worker_bytes} fit"
        )


def announce(result: dict[str, Any], options: JobOptions) -> int:
    """Prints where the logs are and why a job ended, if not well; returns its exit code."""
    if options.agent.output.writes_files:
        print(f"keepstep: logs of the workers: {options.log_dir}", file=sys.stderr)
    if result["exit_code"] != 0:
        print(f"keepstep: {result['reason']}", file=sys.stderr, flush=True)
    return int(result["exit_code"])
