"""Runs one job: checks the settings, starts controller and agent, waits, and cleans up."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep import eventloop
from keepstep.agent.agent import Agent
from keepstep.agent.settings import AgentSettings
from keepstep.agent.spawner import SpawnerProcess
from keepstep.config import RESCUE_PREFIX
from keepstep.controller.controller import Controller
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.freememory import free_bytes
from keepstep.launcher import control
from keepstep.launcher.console import tell_end, tell_folder
from keepstep.launcher.recording import Outputs, record_run
from keepstep.launcher.signals import EndSignals, end_signals, ended_by
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery import EXIT_FAILED, RecoverySettings
from keepstep.systemcalls import check_locks
from keepstep.trace.record import runfolder
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.describe import describe
from keepstep.transports.memory import OneNode, channel_pair

LOGS = "logs"
"""Folder of the workers' logs below the run folder, unless ``--log-dir`` names another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobOptions:
    """A job as the command line describes it."""

    agent: AgentSettings
    recovery: RecoverySettings
    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    keep_run_dir: bool = True
    """False for a temporary folder of this job; `clear_up` removes it."""

    @property
    def log_dir(self) -> Path:
        """The folder of the workers' logs."""
        return self.agent.output.log_dir or self.agent.run_dir / LOGS


@dataclasses.dataclass
class Job:
    """A running job, as a companion sees it: the drill's fault injector or a progress display."""

    controller: Controller
    agent: Agent

    def describe(self) -> dict[str, Any]:
        """Returns the report so far, with the rank, phase and step of each worker."""
        return describe(self.controller.job, self.agent.status())


Companion = Callable[[Job], Awaitable[None]]


def fresh_run_dir() -> Path:
    """Creates a run folder below the system's temporary folder.

    Raises:
        ConfigurationError: it cannot be created.
    """
    run_dir = temporary_folder() / f"keepstep-{secrets.token_hex(4)}"
    run_dir.mkdir(0o700)
    try:
        return check_locks(run_dir)
    except (OSError, KeepstepError):
        run_dir.rmdir()
        raise


def temporary_folder() -> Path:
    """Returns the system's folder for temporary files.

    Raises:
        ConfigurationError: there is none in which this user can write.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise ConfigurationError(
            f"{error.strerror}: set TMPDIR to a folder in which this user can write, or name one with --run-dir"
        ) from error


def run_job(
    options: JobOptions, companion: Companion | None = None, spawner: SpawnerProcess | None = None
) -> dict[str, Any]:
    """Runs a job to its end and returns its report, with ``exit_code`` and ``reason``.

    What each signal does: `keepstep.programs.DISPOSITIONS`. An error in ``companion`` ends the job at once.

    Args:
        options: the job.
        companion: a coroutine function that runs next to the job.
        spawner: a spawner that the caller has started already, because its start takes longest; see
            `SpawnerClient.start`.

    Raises:
        ConfigurationError: the job cannot run with these options; no process is left running.
    """
    run_dir = options.agent.run_dir
    info = runfolder.new_run(options.agent.command, options.agent.place.node, options.recovery)
    try:
        return record_run(
            run_dir, info, options.outputs, lambda recorder: eventloop.run(_run(options, companion, recorder, spawner))
        )
    finally:
        clear_up(options)


def clear_up(options: JobOptions) -> None:
    """Removes a temporary run folder; see `clear_up_folder`."""
    if not options.keep_run_dir:
        clear_up_folder(options.agent.run_dir)


def clear_up_folder(run_dir: Path) -> None:
    """Removes a run folder, unless it contains logs of the workers, or the state of a job that could not go on."""
    if not ((run_dir / LOGS).exists() or any(run_dir.glob(f"{RESCUE_PREFIX}*"))):
        shutil.rmtree(run_dir, ignore_errors=True)


async def _run(
    options: JobOptions, companion: Companion | None, recorder: Recorder, spawner: SpawnerProcess | None
) -> dict[str, Any]:
    ours, theirs = channel_pair()
    # No lease, because the agent runs in this process. It could only miss a heartbeat if the process itself was stopped
    # (SIGSTOP, a suspended laptop), and then the eviction of the only node would end a healthy job.
    machine = ControllerMachine(options.recovery, lease_s=None)
    controller = Controller(machine, OneNode(options.agent.place.node, ours), recorder)
    output = dataclasses.replace(options.agent.output, log_dir=options.log_dir)
    agent = Agent(dataclasses.replace(options.agent, output=output), theirs)
    job = Job(controller, agent)
    with end_signals(drain_on=options.agent.drain_on, pass_on=agent.pass_signal) as signals:
        try:
            starting = asyncio.create_task(agent.start(spawner))
            first: list[asyncio.Future[Any]] = [starting, signals.stop, signals.drain]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                check_memory(options, starting.result().worker_bytes)
                check_devices(options, agent.closed)
                async with control.serve(options.agent.run_dir, job.describe):
                    await _accompany(controller, agent, signals, companion(job) if companion else None)
        finally:
            await agent.stop()
    if controller.job.ended is None:
        controller.job.ended = _unfinished(agent, signals)
    return describe(controller.job)


async def _accompany(
    controller: Controller, agent: Agent, signals: EndSignals, companion: Awaitable[None] | None
) -> None:
    """Runs controller and agent until one of them has ended the job, or a signal that ends it at once comes."""
    deciding = asyncio.create_task(controller.run())
    serving = asyncio.create_task(agent.run())
    waited: set[asyncio.Future[Any]] = {deciding, serving, signals.stop, signals.drain}
    helpers = [asyncio.ensure_future(companion)] if companion is not None else []
    waited.update(helpers)
    try:
        while not (deciding.done() or serving.done() or signals.stop.done()):
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if signals.drain in done:
                controller.drain(ended_by(signals.drain.result()).reason)
            for helper in done.intersection(helpers):
                helper.result()
        if deciding.done():
            deciding.result()
            await serving
        elif serving.done():
            serving.result()
    finally:
        tasks = [deciding, serving, *helpers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unfinished(agent: Agent, signals: EndSignals) -> EndJob:
    return signals.ended() or agent.deserted() or EndJob(EXIT_FAILED, "the agent ended before the job did")


def check_memory(options: JobOptions, worker_bytes: int) -> None:
    """Checks that the job's processes fit into memory.

    Args:
        options: the job.
        worker_bytes: memory of one worker before its script begins, as the spawner has measured it; 0 skips the check.

    Raises:
        ConfigurationError: they do not fit; the message says how many would.
    """
    count = options.recovery.world_size + options.recovery.num_spares
    available = free_bytes()
    if worker_bytes and count * worker_bytes > available:
        raise ConfigurationError(
            f"--nproc-per-node {options.recovery.world_size} with --spares {options.recovery.num_spares}: {count} "
            f"processes need at least {worker_bytes / 2**20:.0f} MiB each, and {available / 2**30:.1f} GiB are free: "
            f"at most {available // worker_bytes} fit"
        )


def check_devices(options: JobOptions, closed: Mapping[int, str]) -> None:
    """Checks that the node has a usable slot for each rank of the job.

    Args:
        options: the job.
        closed: unhealthy device -> the reason why the agent starts no worker on it.

    Raises:
        ConfigurationError: it has too few; the message has the reasons.
    """
    slots = options.agent.place.slots
    left = slots - sum(device < slots for device in closed)
    if left < options.recovery.world_size:
        raise ConfigurationError(
            f"--health act: {options.recovery.world_size} ranks were asked for, and {left} devices are fit to be used: "
            f"{'; '.join(dict.fromkeys(closed.values()))}"
        )


def announce(result: dict[str, Any], options: JobOptions) -> int:
    """Prints where the logs are, how to look at the run, and how it has ended. Returns its exit code."""
    if options.agent.output.writes_files:
        print(f"keepstep: logs of the workers: {options.log_dir}", file=sys.stderr)
    tell_folder(options.agent.run_dir)
    tell_end(result)
    return int(result["exit_code"])
