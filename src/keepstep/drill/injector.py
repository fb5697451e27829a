"""Accompanies a job from outside: faults at random instants, and faults of spares."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import time
from collections.abc import Callable

from keepstep.drill.faults import Fault, claim
from keepstep.launcher.job import Job
from keepstep.protocol.recovery import Stage

LOOK_S = 0.01
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "segv": signal.SIGSEGV}


class OutsideInjector:
    """Brings about the faults that no rank can bring upon itself. ``fired`` lists each with its time and rank."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = [fault for fault in faults if not fault.in_worker]
        self.fired: list[tuple[Fault, float, int | None]] = []

    async def accompany(self, job: Job) -> None:
        """Runs beside the job until all faults have come about or the job has ended."""
        await asyncio.gather(*(self._bring_about(fault, job) for fault in self._faults))

    async def _bring_about(self, fault: Fault, job: Job) -> None:
        if fault.kind == "spare-kill":
            await self._kill_spare(fault, job)
            return
        generator = random.Random(fault.seed)
        for _ in range(fault.count):
            if not await self._until(job, lambda: self._is_training(job)):
                return
            await asyncio.sleep(generator.uniform(0.0, 3.0 * self._step_s(job)))
            rank = generator.randrange(job.controller.job.settings.world_size) if fault.rank is None else fault.rank
            known = len(job.controller.job.records)
            if job.controller.job.digests:
                return  # a rank has completed the last step, and the code after it is the script's own
            if self._strike(fault, job, rank):
                await self._until(job, functools.partial(self._has_more_records, job, known))

    async def _kill_spare(self, fault: Fault, job: Job) -> None:
        def is_there() -> bool:
            workers = job.agent.status()
            steps = [worker["step"] for worker in workers if worker["rank"] is not None]
            has_spare = any(worker["rank"] is None and worker["pid"] is not None for worker in workers)
            return has_spare and any(isinstance(step, int) and step >= (fault.step or 0) for step in steps)

        if await self._until(job, is_there):
            self._strike(fault, job, None)

    def _strike(self, fault: Fault, job: Job, rank: int | None) -> bool:
        target = next((w["pid"] for w in job.agent.status() if w["rank"] == rank and w["pid"] is not None), None)
        if not isinstance(target, int):
            return False
        now_s = time.monotonic()
        try:
            os.kill(target, SIGNALS.get(fault.kind, signal.SIGKILL))
        except ProcessLookupError:
            return False
        claim(job.agent.settings.run_dir, fault, now_s)
        self.fired.append((fault, now_s, rank))
        return True

    @staticmethod
    def _has_more_records(job: Job, known: int) -> bool:
        return len(job.controller.job.records) > known

    @staticmethod
    def _is_training(job: Job) -> bool:
        """Training, and at least one step was completed since the last recovery."""
        machine = job.controller.job
        if machine.stage is not Stage.TRAINING:
            return False
        return machine.records[-1].resumed_s is not None if machine.records else machine.progress.trained_to > 0

    @staticmethod
    def _step_s(job: Job) -> float:
        return max((record.first_step_s or 0.0 for record in job.controller.job.records[-4:]), default=0.05)

    @staticmethod
    async def _until(job: Job, condition: Callable[[], bool]) -> bool:
        """Waits for ``condition()``; False when the job has finished its steps first."""
        while job.controller.job.stage not in (Stage.FINISHED, Stage.RESCUING, Stage.ENDED):
            if condition():
                return True
            await asyncio.sleep(LOOK_S)
        return False
