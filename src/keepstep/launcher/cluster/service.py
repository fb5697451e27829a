"""The controller as a separate program. It serves the agents of a job over the network, and may be restarted.

A controller must hold the run's lease to serve it. So only one serves a run at a time, and another one can take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from keepstep import eventloop
from keepstep.controller import gc_freeze
from keepstep.controller.controller import Controller
from keepstep.controller.lease import RunLease
from keepstep.controller.stores import ControllerStores
from keepstep.errors import ConfigurationError
from keepstep.launcher import control
from keepstep.launcher.cluster.flags import split
from keepstep.launcher.console import follow
from keepstep.launcher.recording import Outputs, record_run
from keepstep.launcher.signals import end_signals, ended_by, stop_signal
from keepstep.programs import Program
from keepstep.protocol.controller import ControllerMachine, JournalEntry
from keepstep.protocol.deadlines import LEASE_S
from keepstep.protocol.lease import HOLD_S
from keepstep.protocol.messages import EndJob, printable
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.systemcalls import open_files
from keepstep.trace.record import journal, runfolder
from keepstep.trace.record.jobclock import JobClock
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.describe import describe
from keepstep.transports.relay.connections import RelayedNodeConnections
from keepstep.transports.rpc.directory import WeightsDirectory
from keepstep.transports.rpc.server import RpcNodeConnections
from keepstep.trust.certificates import ServerFiles
from keepstep.trust.tokens import Role, Secret, check

REFUSALS_S = 10.0
MAX_REFUSALS = 20
"""The controller logs up to this many refusals in `REFUSALS_S` seconds, and only the number of the others."""
POLL_INTERVAL_S = 0.2
"""How often a standby checks the lease."""


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerOptions:
    """A controller as its command line describes it."""

    recovery: RecoverySettings
    run_dir: Path
    listen: str
    secret: Secret
    tls: ServerFiles | None
    lease_s: float = LEASE_S
    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    is_continuing: bool = False
    """Whether to continue the unfinished run in the folder; see also ``is_standby`` and ``is_child``."""
    drained_by: int | None = None
    """The signal that drains the job: its former controller received the order and may have died before it acted."""
    drain_on: tuple[int, ...] = ()
    """Signals that drain besides SIGTERM and SIGHUP."""
    is_child: bool = False
    """Whether the node's agent has started it, and tells it what to do about signals. It moves an unfinished run in the
    folder aside, for the agent of that is gone, too."""
    is_standby: bool = False
    """Whether to wait until the controller of the folder's run is gone, and then to take over."""
    takeover_s: float = HOLD_S
    """Another controller may take over if this one does not renew its lease for this long."""
    num_relays: int = 0
    """Number of relay processes that hold the connections to agents; 0: the controller holds them."""
    is_durable: bool = True
    """Whether the run must be able to continue on another machine if this one is lost."""


def run_controller(options: ControllerOptions) -> dict[str, Any]:
    """Serves a job until it has ended and returns its report, with ``exit_code`` and ``reason``.

    What each signal does: `keepstep.programs.DISPOSITIONS`. While a standby waits, a signal ends the standby only.

    Raises:
        ConfigurationError: the controller cannot serve the run with these options.
        LeaseLost: another controller serves the run, or may serve it.
    """
    with RunLease(options.run_dir, options.takeover_s) as lease:
        if not (options.is_continuing or options.is_standby or options.is_child):
            _refuse_unfinished(options.run_dir, lease)
        if (stopped := eventloop.run(_await_turn(options, lease))) is not None:
            return {"exit_code": stopped.exit_code, "reason": f"{stopped.reason} while it waited"}
        if lease.taken_from is not None:
            print(f"keepstep: takes over from {lease.taken_from}", file=sys.stderr, flush=True)
        if options.is_continuing or (options.is_standby and _is_there(options.run_dir)):
            return _go_on(options, lease)
        info = runfolder.new_run(tuple(sys.argv), socket.gethostname(), options.recovery)
        return _record(options, info, lease, None, ControllerMachine(options.recovery, options.lease_s))


def _refuse_unfinished(run_dir: Path, lease: RunLease) -> None:
    """Refuses a folder whose run has not ended: its nodes may still train, and would have no controller any more.

    Raises:
        ConfigurationError: its run has not ended. If a live process certainly serves it, `_await_turn` says so instead.
    """
    lease.look()
    try:
        is_unfinished = runfolder.read_info(run_dir).ended is None and (run_dir / runfolder.JOURNAL).stat().st_size > 0
    except (ConfigurationError, OSError):  # no run, one that no node has joined, or one that cannot be continued
        return
    if is_unfinished and not lease.is_served:
        raise ConfigurationError(
            f"--run-dir {run_dir}: the run in there has not ended, and its nodes may still train. --continue goes on "
            f"with it (holder of its lease: {lease.served_by()}); for a new run name another folder, or delete this one"
        )


async def _await_turn(options: ControllerOptions, lease: RunLease) -> EndJob | None:
    """Waits until this controller holds the lease. Returns None, or how a signal has ended the wait.

    Raises:
        ConfigurationError: another controller serves the run, and this one is not a standby; or this one could not take
            over: the run was started with other settings, or by a version that gives other orders.
    """
    is_told = False
    with stop_signal(is_child=options.is_child) as stopped:
        while not lease.take():
            if options.is_standby:
                _check_settings(options)
                if not is_told:
                    _check_replay(options)
                    print(f"keepstep: standby for {lease.served_by()}", file=sys.stderr, flush=True)
                    is_told = True
            elif lease.is_served:
                raise ConfigurationError(
                    f"--run-dir {options.run_dir}: the run in there is served by {lease.served_by()}; "
                    "--standby waits until it is gone"
                )
            await asyncio.wait({stopped}, timeout=POLL_INTERVAL_S)
            if stopped.done():
                return ended_by(stopped.result())
    return None


def _is_there(run_dir: Path, name: str = runfolder.INFO) -> bool:
    """Whether a file exists. It lists the folder, because a network file system may have cached the file's absence."""
    return name in os.listdir(run_dir)


def _check_settings(options: ControllerOptions) -> None:
    if _is_there(options.run_dir) and runfolder.read_info(options.run_dir).settings != options.recovery:
        raise ConfigurationError(f"--run-dir {options.run_dir}: the run in there was started with other settings")


def _check_replay(options: ControllerOptions) -> None:
    """Replays the journal so far, so that a standby of another version is refused while the first controller lives."""
    if _is_there(options.run_dir, runfolder.JOURNAL):
        info = runfolder.read_info(options.run_dir)
        _replayed(options, info, journal.read(options.run_dir / runfolder.JOURNAL), info.clock().now_s())


def _replayed(
    options: ControllerOptions, info: runfolder.RunInfo, entries: Iterable[JournalEntry], now_s: float
) -> ControllerMachine:
    """Builds the machine from the journal.

    Raises:
        ConfigurationError: it gives other orders than those that the agents have received.
    """
    try:
        return ControllerMachine.from_journal(options.recovery, entries, now_s, options.lease_s)
    except ConfigurationError as error:
        raise ConfigurationError(runfolder.other_version(options.run_dir, info, error)) from error


def _go_on(options: ControllerOptions, lease: RunLease) -> dict[str, Any]:
    """Continues the run in the folder, whose former controller is gone."""
    _check_settings(options)
    info = runfolder.read_info(options.run_dir)
    if info.ended is not None:
        print(
            f"keepstep: the run in {options.run_dir} has ended: {printable(info.ended.reason)}",
            file=sys.stderr,
            flush=True,
        )
        return {"exit_code": info.ended.exit_code, "reason": info.ended.reason}
    is_begun = _is_there(options.run_dir, runfolder.JOURNAL)
    entries = journal.take_over(options.run_dir / runfolder.JOURNAL) if is_begun else []
    after = runfolder.goes_on(info, socket.gethostname(), entries[-1].at_s if entries else None)
    machine = _replayed(options, info, _confirmed(entries, lease), after.clock().now_s())
    return _record(options, after, lease, entries, machine)


def _record(
    options: ControllerOptions,
    info: runfolder.RunInfo,
    lease: RunLease,
    entries: list[JournalEntry] | None,
    machine: ControllerMachine,
) -> dict[str, Any]:
    return record_run(
        options.run_dir,
        info,
        options.outputs,
        lambda recorder: eventloop.run(_serve(options, recorder, info.clock(), lease, machine, entries is not None)),
        entries,
        is_durable=options.is_durable,
        is_continuable=True,
        is_displacing=lease.taken_from is not None,
    )


async def _serve(
    options: ControllerOptions,
    recorder: Recorder,
    clock: JobClock,
    lease: RunLease,
    machine: ControllerMachine,
    is_restarted: bool,
) -> dict[str, Any]:
    with contextlib.closing(ControllerStores(options.run_dir, is_durable=options.is_durable)) as stores:
        open_files()  # each connection takes one
        connections = _connections(options, lease.term)
        port = await connections.start(*split(options.listen), options.tls)
        print(f"keepstep: controller listens on port {port}", file=sys.stderr, flush=True)
        controller = Controller(
            machine,
            connections,
            recorder,
            clock=clock,
            confirm=lease.confirm,
            when_calm=gc_freeze.set_aside,
            is_restarted=is_restarted,
            stores=stores,
        )
        if options.drained_by is not None:
            controller.drain(ended_by(options.drained_by).reason)
        async with control.serve(options.run_dir, lambda: describe(machine.job, _places(machine.job))):
            try:
                await _until_ended(controller, lease, options)
            finally:
                await connections.stop()
    return describe(machine.job)


def _connections(options: ControllerOptions, term: int) -> RpcNodeConnections | RelayedNodeConnections:
    """Creates the connections to agents: in this process, or in relays."""
    if options.num_relays:
        return RelayedNodeConnections(options.num_relays, options.secret, Refusals().tell, term)
    refused = Refusals().tell
    directory = WeightsDirectory(lambda token: check(options.secret, token, Role.PUBLISHER, Role.RECEIVER), refused)
    return RpcNodeConnections(lambda token: check(options.secret, token).name, refused, term, directory)


def _confirmed(entries: list[JournalEntry], lease: RunLease) -> Iterator[JournalEntry]:
    """Yields the entries and renews the lease, so that no standby takes over while a long journal is replayed."""
    for entry in entries:
        lease.confirm()
        yield entry


async def _until_ended(controller: Controller, lease: RunLease, options: ControllerOptions) -> None:
    """Runs the controller until its job has ended, a signal has ended it, or the controller has lost the lease."""
    program = Program.CHILD if options.is_child else Program.CONTROLLER
    with end_signals(program, options.drain_on) as signals:
        deciding = asyncio.create_task(controller.run())
        keeping = asyncio.create_task(lease.keep())
        following = asyncio.create_task(follow(controller.job))
        waited: set[asyncio.Future[Any]] = {deciding, keeping, following, signals.stop, signals.drain}
        try:
            while not (deciding.done() or keeping.done() or signals.stop.done()):
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if signals.drain in done:
                    controller.drain(ended_by(signals.drain.result()).reason)
                if following in done:
                    following.result()  # raises what has ended it
            if deciding.done():
                deciding.result()
            elif keeping.done():
                keeping.result()
            else:
                deciding.cancel()
                await asyncio.wait({deciding})
                await controller.end(ended_by(signals.stop.result()))
        finally:
            for task in (deciding, keeping, following):
                task.cancel()
            await asyncio.gather(deciding, keeping, following, return_exceptions=True)


def _places(job: RecoveryMachine) -> list[dict[str, object]]:
    """Returns an entry for each live worker. Step and phase are None, as ``keepstep status`` reads them in the log."""
    return [
        {
            "worker": worker.worker,
            "pid": worker.pid,
            "node": worker.node,
            "rank": worker.rank,
            "role": "spare" if worker.rank is None else "worker",
            "generation": job.generation,
            "step": None,
            "phase": None,
        }
        for worker in job.roster.workers.values()
        if not worker.lost and not worker.done
    ]


class Refusals:
    """Logs refused connections, at a limited rate."""

    def __init__(self) -> None:
        self._since_s = -math.inf
        self._num = 0

    def tell(self, address: str, why: str) -> None:
        """Logs the address of a refused client and the reason."""
        now_s = time.monotonic()
        if now_s >= self._since_s + REFUSALS_S:
            if self._num > MAX_REFUSALS:
                self._print(f"refused {self._num - MAX_REFUSALS} more")
            self._since_s, self._num = now_s, 0
        self._num += 1
        if self._num <= MAX_REFUSALS:
            self._print(f"refused {address}: {why}")

    def _print(self, text: str) -> None:
        print(f"keepstep: {printable(text)}", file=sys.stderr, flush=True)
