"""Runs inside each worker of a drill: records its rank's state at every step, and injects the planned faults.

A fault hits an exact place of a step or a recovery. Before a step with a fault all ranks wait for a warm spare.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from keepstep import config
from keepstep.drill.faults import HOLD_FILE, SPARES_SOCKET, DrillFault, claim, is_fired, read_plan
from keepstep.drill.records import StateRecorder
from keepstep.launcher.control import connect
from keepstep.protocol.phases import Phase
from keepstep.protocol.worker import WorkerMachine
from keepstep.shared.tagpage import TagWriter

SPARE_S = 300.0
"""How long a fault waits for a starting spare that does not reach its first step."""
POLL_INTERVAL_S = 0.05
"""How often a rank that waits for a spare checks whether another rank has failed."""
HOLD_S = 20.0
"""How long ranks wait for each other in a barrier fault before the drill continues."""
EXIT_CODE = 7


class Observed(Protocol):
    """The part of `keepstep.worker.coordination.Coordination` that the injector needs."""

    observe: Callable[[str], None]
    framework_step: int | None
    digests: Callable[[], Mapping[str, tuple[str, tuple[float, float, float] | None]]]
    save_state_dicts: Callable[[Path], None]
    machine: WorkerMachine
    page: TagWriter

    def wait_until_interrupted(self, timeout_s: float) -> None:
        """Blocks until the worker knows of a failure, or until the timeout."""


class FaultRaisedError(RuntimeError):
    """The exception of a ``raise`` fault."""


def install(coordination: Observed) -> None:
    """Installs recorder and injector in a worker. `keepstep.config.WorkerConfig.observer` names this function."""
    settings = config.worker_config()
    assert settings is not None
    run_dir = Path(settings.run_dir)
    recorder = StateRecorder(coordination, run_dir)
    injector = WorkerInjector(coordination, run_dir, settings.world_size)

    def observe(moment: str) -> None:
        recorder.observe(moment)  # first, because the injector may not return
        injector.observe(moment)

    coordination.observe = observe


class WorkerInjector:
    """Injects faults at moments of one rank. `observe` is called in the thread that reaches the moment."""

    def __init__(self, coordination: Observed, run_dir: Path, world_size: int) -> None:
        self._coordination = coordination
        self._run_dir = run_dir
        self._world_size = world_size
        self._plan = read_plan(run_dir)
        self._faults = [fault for fault in self._plan if fault.in_worker]
        self._has_begun = False
        """Whether this process has begun a step."""
        self._completes = False
        """Whether the rank's last phase was the update, so that `Phase.UPDATED` is the end of a step."""
        self._meetings = {fault.number: self._open_meeting(fault) for fault in self._faults if fault.phase == "barrier"}

    def _open_meeting(self, fault: DrillFault) -> int:
        """Opens a pipe by which the rank that has left the barrier notifies the rank that must fail in it."""
        path = self._run_dir / f"left-{fault.number}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def observe(self, moment: str) -> None:
        """Injects the faults of a moment, and waits for a warm spare before a step with a fault.

        Args:
            moment: the rank's current moment in a step or a recovery.
        """
        machine = self._coordination.machine
        rank, step = machine.rank, machine.steps.step
        if moment == Phase.FORWARD and step == 0 and self._is_start():
            self._await_spare_before(0)
        for fault in self._faults:
            if fault.during is not None:
                is_hit = rank == fault.rank and self._is_moment(fault.during, moment) and not self._is_start()
                if is_hit and self._is_turn_of(fault):
                    self._fire(fault)
            elif fault.phase == "barrier":
                self._stage_barrier(fault, moment, rank, step)
            elif (fault.phase, fault.rank) == (moment, rank) and step >= (fault.step or 0):
                self._fire(fault)

        if moment == Phase.UPDATED and self._completes:
            self._await_spare_before(step + 1)
        self._has_begun = self._has_begun or moment == Phase.FORWARD
        if moment in list(Phase):
            self._completes = moment == Phase.OPTIMIZER

    def _await_spare_before(self, step: int) -> None:
        """Waits for a warm spare if the next step has a fault. All ranks wait here, where no time is measured.

        In the first step after a recovery no spare has been started yet, so a fault in it finds none.
        """
        is_due = any(
            fault.step is not None and fault.step <= step and fault.loses_rank and not is_fired(self._run_dir, fault)
            for fault in self._faults
        )
        if is_due or (self._run_dir / HOLD_FILE).exists():
            await_spare(self._coordination, self._run_dir)

    def _is_start(self) -> bool:
        """Whether this is the first generation. It connects and restores, too, but is not a recovery."""
        return self._coordination.machine.target_generation <= 1

    def _is_turn_of(self, fault: DrillFault) -> bool:
        """Whether the fault has come about in whose recovery this one is to strike: the one before it in the list."""
        earlier = [each for each in self._plan if each.number < fault.number and each.during is None]
        return not earlier or is_fired(self._run_dir, earlier[-1])

    def _is_moment(self, during: str, moment: str) -> bool:
        if during == "forward":  # of a replacement; its peers are not slow, they have had their first batch
            return moment == Phase.FORWARD and not self._has_begun
        # A restore fault should hit halfway: after the rank's first bucket, or at the start if it transfers none.
        return moment == during or (during == "restore" and moment == "bucket")

    def _stage_barrier(self, fault: DrillFault, moment: str, rank: int | None, step: int) -> None:
        """Injects a fault into the barrier: the rank fails when one other rank has left it and the rest have not."""
        if step < (fault.step or 0) or rank is None or moment not in ("barrier", "optimizer"):
            return
        others = [other for other in range(self._world_size) if other != fault.rank]
        leaver = others[0] if len(others) > 1 else None
        if is_fired(self._run_dir, fault):
            return
        if moment == "optimizer" and rank == leaver:
            os.write(self._meetings[fault.number], b"x")
        if moment != "barrier":
            return
        if rank == fault.rank:
            if leaver is not None:
                select.select([self._meetings[fault.number]], [], [], HOLD_S)
            self._fire(fault)
        elif rank != leaver:
            self._coordination.wait_until_interrupted(HOLD_S)

    def _fire(self, fault: DrillFault) -> None:
        is_again = not claim(self._run_dir, fault, time.monotonic())
        if is_again and not fault.strikes_each_replacement:
            return
        if fault.kind != "pause" and fault.seconds is not None:
            threading.Thread(target=self._strike_later, args=(fault, fault.seconds), daemon=True).start()
        else:
            self._strike(fault)

    def _strike_later(self, fault: DrillFault, seconds: float) -> None:
        threading.Event().wait(seconds)
        self._strike(fault)

    def _strike(self, fault: DrillFault) -> None:
        match fault.kind:
            case "pause":
                assert fault.seconds is not None
                threading.Event().wait(fault.seconds)
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


def await_spare(coordination: Observed, run_dir: Path) -> None:
    """Waits until the launcher answers that a spare is warm or that none will come, or until another rank fails."""
    try:
        connection = connect(run_dir, SPARES_SOCKET)
    except OSError:
        return  # the drill does not wait for spares, or the job has none
    deadline_s = time.monotonic() + SPARE_S
    coordination.page.set_waiting(True)
    with connection:
        while not coordination.machine.interrupted and time.monotonic() < deadline_s:
            if select.select([connection], [], [], POLL_INTERVAL_S)[0]:
                break
            coordination.page.progress()
        else:
            if not coordination.machine.interrupted:
                print(f"keepstep drill: no spare is warm after {SPARE_S:g} s: the fault comes without", file=sys.stderr)
    coordination.page.set_waiting(False)
