"""Runs inside each worker of a drill: records the state of this rank at every step, and brings a fault upon it at the
exact place that the plan names."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from keepstep import config
from keepstep.drill.faults import Fault, claim, read_plan
from keepstep.drill.records import StateRecorder
from keepstep.protocol.worker import WorkerMachine

HOLD_S = 20.0
"""How long ranks wait for one another at a staged moment before the drill goes on without."""
EXIT_CODE = 7


class Observed(Protocol):
    """What the injector needs of a worker's `keepstep.worker.coordination.Coordination`."""

    observe: Callable[[str], None]
    digests: Callable[[], dict[str, str]]
    machine: WorkerMachine

    def wait_until_interrupted(self, timeout_s: float) -> None:
        """Blocks until a failure is known."""


class FaultRaisedError(RuntimeError):
    """The exception of a ``raise`` fault."""


def install(coordination: Observed) -> None:
    """Entrance named in `keepstep.config.WorkerConfig.observer`."""
    settings = config.worker_config()
    assert settings is not None
    run_dir = Path(settings.run_dir)
    recorder = StateRecorder(coordination, run_dir)
    injector = Injector(coordination, run_dir, settings.world_size)

    def observe(moment: str) -> None:
        recorder.observe(moment)  # first, for the injector may not return
        injector.observe(moment)

    coordination.observe = observe


class Injector:
    """Watches one rank's moments. `observe` is called from whichever thread lives through the moment."""

    def __init__(self, coordination: Observed, run_dir: Path, world_size: int) -> None:
        self._coordination = coordination
        self._run_dir = run_dir
        self._world_size = world_size
        self._faults = [fault for fault in read_plan(run_dir) if fault.in_worker]
        self._meetings = {fault.number: self._open_meeting(fault) for fault in self._faults if fault.phase == "barrier"}

    def _open_meeting(self, fault: Fault) -> int:
        """A pipe by which a rank that has left the barrier tells the one that is to fail in it."""
        path = self._run_dir / f"left-{fault.number}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def observe(self, moment: str) -> None:
        """A moment of this rank's step or recovery has come."""
        machine = self._coordination.machine
        rank, step = machine.rank, machine.steps.step
        for fault in self._faults:
            if fault.during is not None:
                if rank == fault.rank and _is_moment(fault.during, moment) and not self._is_start():
                    self._fire(fault)
            elif fault.phase == "barrier":
                self._stage_barrier(fault, moment, rank, step)
            elif (fault.phase, fault.step, fault.rank) == (moment, step, rank):
                self._fire(fault)

    def _is_start(self) -> bool:
        """The first generation is connected and restored, too, but that is no recovery."""
        return self._coordination.machine.target_generation <= 1

    def _stage_barrier(self, fault: Fault, moment: str, rank: int | None, step: int) -> None:
        """The rank fails when another one has left the barrier and the rest has not."""
        if step != fault.step or rank is None:
            return
        others = [other for other in range(self._world_size) if other != fault.rank]
        leaver = others[0] if len(others) > 1 else None
        if moment == "optimizer" and rank == leaver:
            os.write(self._meetings[fault.number], b"x")
        if moment != "barrier" or (self._run_dir / f"fired-{fault.number}").exists():
            return
        if rank == fault.rank:
            if leaver is not None:
                select.select([self._meetings[fault.number]], [], [], HOLD_S)
            self._fire(fault)
        elif rank != leaver:
            self._coordination.wait_until_interrupted(HOLD_S)

    def _fire(self, fault: Fault) -> None:
        if not claim(self._run_dir, fault, time.monotonic()):
            return
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "segv":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(EXIT_CODE)
            case _:
                raise FaultRaisedError(f"raised by the drill: {fault}")


def _is_moment(during: str, moment: str) -> bool:
    # State is best caught half-way: the rank fails after its first bucket, or at the start if it moves none.
    return moment == during or (during == "restore" and moment == "bucket")
