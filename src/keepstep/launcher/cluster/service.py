"""A controller as a program of its own: it serves the agents of a job over the network, and may die and come back."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from keepstep.controller.controller import Controller
from keepstep.errors import ConfigurationError, TokenRefused
from keepstep.launcher import control
from keepstep.launcher.cluster.flags import split
from keepstep.launcher.console import follow
from keepstep.launcher.recording import Outputs, record_run
from keepstep.launcher.signals import ended_by, stop_signal
from keepstep.protocol.controller import LEASE_S, ControllerMachine, JournalEntry
from keepstep.protocol.recovery import RecoveryMachine, RecoverySettings
from keepstep.trace.record import journal, runfolder
from keepstep.trace.record.recorder import Recorder
from keepstep.trace.timeline.describe import describe
from keepstep.transports.rpc.server import RpcNodeLines
from keepstep.trust.certificates import ServerFiles
from keepstep.trust.tokens import Role, Secret, check

REFUSALS_S = 10.0
MAX_REFUSALS = 20
"""So many are told in so long; of the others only how many they were."""


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
    """Go on with the unfinished run in the folder; otherwise it is moved aside."""


def run_controller(options: ControllerOptions) -> dict[str, Any]:
    """Serves a job until it has ended and returns its report, with ``exit_code`` and ``reason``.

    SIGINT, SIGTERM and SIGHUP end the job.

    Raises:
        ConfigurationError: it cannot be served as asked.
    """
    if not options.is_continuing:
        info = runfolder.new_run(tuple(sys.argv), socket.gethostname(), options.recovery)
        return record_run(
            options.run_dir, info, options.outputs, lambda recorder: asyncio.run(_serve(options, recorder, None))
        )
    info = runfolder.read_info(options.run_dir)
    if info.settings != options.recovery:
        raise ConfigurationError(f"--run-dir {options.run_dir}: the run in there was started with other settings")
    entries = journal.read(options.run_dir / runfolder.JOURNAL)
    return record_run(
        options.run_dir,
        msgspec.structs.replace(info, pid=os.getpid()),
        options.outputs,
        lambda recorder: asyncio.run(_serve(options, recorder, entries)),
        entries,
    )


async def _serve(options: ControllerOptions, recorder: Recorder, entries: list[JournalEntry] | None) -> dict[str, Any]:
    if entries is None:
        machine = ControllerMachine(options.recovery, options.lease_s)
    else:
        machine = ControllerMachine.from_journal(options.recovery, entries, time.monotonic(), options.lease_s)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection takes three
    lines = RpcNodeLines(lambda token: _node_of(options.secret, token), Refusals().tell)
    port = await lines.start(*split(options.listen), options.tls)
    print(f"keepstep: controller listens on port {port}", file=sys.stderr, flush=True)
    controller = Controller(machine, lines, recorder, is_restarted=entries is not None)
    async with control.serve(options.run_dir, lambda: describe(machine.job, _places(machine.job))):
        try:
            await _until_ended(controller)
        finally:
            await lines.stop()
    return describe(machine.job)


async def _until_ended(controller: Controller) -> None:
    """Runs the controller until its job has ended, by itself or by a signal."""
    with stop_signal() as stopped:
        deciding = asyncio.create_task(controller.run())
        following = asyncio.create_task(follow(controller.job))
        try:
            either: set[asyncio.Future[Any]] = {deciding, stopped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                deciding.result()
            else:
                deciding.cancel()
                await asyncio.wait({deciding})
                await controller.end(ended_by(stopped.result()))
        finally:
            following.cancel()


def _places(job: RecoveryMachine) -> list[dict[str, object]]:
    """Every worker as the controller knows it; in which phase it is only its own node sees."""
    return [
        {
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


def _node_of(secret: Secret, token: str) -> str:
    claim = check(secret, token)
    if claim.role is not Role.AGENT:
        raise TokenRefused(f"the token of {claim.role} {claim.name!r} is not for agents")
    return claim.name


class Refusals:
    """Tells who was sent away, but not more often than anybody could read."""

    def __init__(self) -> None:
        self._since_s = -math.inf
        self._num = 0

    def tell(self, address: str, why: str) -> None:
        """Somebody was sent away."""
        now_s = time.monotonic()
        if now_s >= self._since_s + REFUSALS_S:
            if self._num > MAX_REFUSALS:
                self._print(f"refused {self._num - MAX_REFUSALS} more")
            self._since_s, self._num = now_s, 0
        self._num += 1
        if self._num <= MAX_REFUSALS:
            self._print(f"refused {address}: {why}")

    def _print(self, text: str) -> None:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)
