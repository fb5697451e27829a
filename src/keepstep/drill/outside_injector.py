"""Injects faults from outside of the workers: at random instants, and into spares. Tells ranks when a spare is warm."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from keepstep.drill.faults import HOLD_FILE, SPARES_SOCKET, DrillFault, claim
from keepstep.launcher import control
from keepstep.launcher.job import Job
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.placement.roster import Worker

POLL_INTERVAL_S = 0.01
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "segv": signal.SIGSEGV}


class OutsideInjector:
    """Injects the faults that no rank can inject itself. ``fired`` lists each with its time and rank.

    It also answers ranks that wait for a warm spare before a step with a fault.
    """

    def __init__(self, faults: list[DrillFault], *, awaits_spares: bool) -> None:
        self._faults = [fault for fault in faults if not fault.in_worker]
        by_step = Counter(fault.step for fault in faults if fault.in_worker and fault.loses_rank)
        self._num_at_once = max(by_step.values(), default=1)
        self._awaits_spares = awaits_spares
        self._is_over = False
        self.fired: list[tuple[DrillFault, float, int | None]] = []

    async def accompany(self, job: Job) -> None:
        """Runs next to the job until it has ended, or until all faults are injected if no rank waits for spares."""
        everything = asyncio.gather(*(self._bring_about(fault, job) for fault in self._faults))
        if not self._awaits_spares or not job.controller.job.settings.num_spares:
            await everything
            return
        answer = functools.partial(self._warm_spare, job)
        async with control.serve(job.agent.settings.run_dir, answer, SPARES_SOCKET):
            try:
                await everything
                await self._until(job, lambda: False)
            finally:
                self._is_over = True

    async def _warm_spare(self, job: Job) -> bool:
        """Waits until as many spares are warm as one step needs. Returns False if no spare will be warm."""
        num_spares = min(self._num_at_once, job.controller.job.settings.num_spares)

        def need_not_wait() -> bool:
            return self._is_over or num_warm_spares(job) >= num_spares or not spare_will_come(job)

        await self._until(job, need_not_wait)
        return num_warm_spares(job) > 0

    async def _hold_for_a_spare(self, job: Job) -> None:
        """Holds all ranks between two steps until a spare is warm, unless the drill does not wait for spares."""
        if not self._awaits_spares or not job.controller.job.settings.num_spares or num_warm_spares(job):
            return
        hold = job.agent.settings.run_dir / HOLD_FILE
        hold.touch()
        try:
            await self._warm_spare(job)
        finally:
            hold.unlink()

    async def _bring_about(self, fault: DrillFault, job: Job) -> None:
        if fault.kind == "spare-kill":
            await self._kill_spare(fault, job)
            return
        generator = random.Random(fault.seed)
        for _ in range(fault.count):
            if not await self._until(job, lambda: self._is_training(job)):
                return
            await self._hold_for_a_spare(job)
            await asyncio.sleep(generator.uniform(0.0, 3.0 * self._step_s(job)))
            rank = generator.randrange(job.controller.job.settings.world_size) if fault.rank is None else fault.rank
            known = len(job.controller.job.records)
            if job.controller.job.digests:
                return  # a rank has completed the last step: keepstep does not protect the code after it
            if self._strike(fault, job, rank):
                await self._until(job, functools.partial(self._has_more_records, job, known))

    async def _kill_spare(self, fault: DrillFault, job: Job) -> None:
        def is_there() -> bool:
            workers = job.agent.status()
            steps = [worker["step"] for worker in workers if worker["rank"] is not None]
            has_spare = any(worker["rank"] is None and worker["pid"] is not None for worker in workers)
            if self._awaits_spares:
                has_spare = has_spare and num_warm_spares(job) > 0
            return has_spare and any(isinstance(step, int) and step >= (fault.step or 0) for step in steps)

        if await self._until(job, is_there):
            self._strike(fault, job, None)

    def _strike(self, fault: DrillFault, job: Job, rank: int | None) -> bool:
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
        """Whether the job is training and has completed a step since the last recovery."""
        machine = job.controller.job
        if machine.stage is not Stage.TRAINING:
            return False
        return machine.records[-1].resumed_s is not None if machine.records else machine.progress.trained_to > 0

    @staticmethod
    def _step_s(job: Job) -> float:
        return max((record.first_step_s or 0.0 for record in job.controller.job.records[-4:]), default=0.05)

    @staticmethod
    async def _until(job: Job, condition: Callable[[], bool]) -> bool:
        """Waits for ``condition()``. Returns False if the job has finished its steps before."""
        while job.controller.job.stage not in (Stage.FINISHED, Stage.RESCUING, Stage.ENDED):
            if condition():
                return True
            await asyncio.sleep(POLL_INTERVAL_S)
        return False


def num_warm_spares(job: Job) -> int:
    """Returns how many spares can take a rank at once."""
    return sum(_is_warm(spare) for spare in job.controller.job.roster.spares())


def spare_will_come(job: Job) -> bool:
    """Whether one more spare will be warm: it is starting, or will be started when the current recovery is over."""
    machine = job.controller.job
    return machine.stage is not Stage.TRAINING or not all(_is_warm(spare) for spare in machine.roster.spares())


def _is_warm(spare: Worker) -> bool:
    """Whether it waits at its first step, or cannot continue without a rank."""
    return spare.ready is not None or spare.awaits_rank
