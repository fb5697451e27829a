"""The drill waits for a warm spare: the launcher knows of it, and the ranks ask between two steps."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.drill.faults import HOLD_FILE, SPARES_SOCKET, DrillFault, claim, parse, write_plan
from keepstep.drill.outside_injector import OutsideInjector, num_warm_spares, spare_will_come
from keepstep.drill.worker_injector import WorkerInjector, await_spare
from keepstep.launcher import control
from keepstep.launcher.job import Job
from keepstep.protocol.messages import RankAwaited, StateRecovered, WorkerReady
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.worker import WorkerMachine

KILL = DrillFault(number=0, kind="kill", step=3, phase="forward", rank=1)


def as_job(simulated: SimulatedJob, run_dir: Path = Path()) -> Job:
    """What the injector looks at of a running job."""
    settings = SimpleNamespace(run_dir=run_dir)
    seen: Any = SimpleNamespace(
        controller=SimpleNamespace(job=simulated.machine), agent=SimpleNamespace(settings=settings)
    )
    job: Job = seen
    return job


# ---- what the launcher knows ----------------------------------------------------------------------------------------


def starting(world_size: int = 2) -> SimulatedJob:
    """A job in training whose spare has not come to its first step yet."""
    simulated = SimulatedJob(world_size, num_spares=1)
    simulated._withheld.add((world_size, WorkerReady))
    return simulated.bring_all(1, Phase.UPDATED)


def test_a_spare_that_starts_up_will_come_and_is_not_warm() -> None:
    simulated = starting()
    assert not num_warm_spares(as_job(simulated))
    assert spare_will_come(as_job(simulated))
    simulated.release()
    simulated.settle()
    assert num_warm_spares(as_job(simulated))


def test_a_spare_comes_when_a_recovery_is_over() -> None:
    simulated = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    simulated.withhold(simulated.holder(0), StateRecovered)
    simulated.kill(simulated.holder(1))
    simulated.settle()
    job = as_job(simulated)
    assert not simulated.machine.roster.spares()
    assert spare_will_come(job)
    assert not num_warm_spares(job)
    simulated.release()
    simulated.settle()
    assert num_warm_spares(job)


def test_no_spare_comes_where_the_budget_is_used_up() -> None:
    simulated = SimulatedJob(world_size=2, num_spares=1, max_restarts=0).bring_all(3, Phase.BACKWARD)
    simulated.kill(simulated.holder(1))
    simulated.bring_all(4, Phase.UPDATED)
    assert not spare_will_come(as_job(simulated))


def test_a_spare_that_awaits_a_rank_is_as_warm_as_it_gets() -> None:
    simulated = starting()
    simulated.say(RankAwaited(2))
    assert num_warm_spares(as_job(simulated))


def test_a_step_that_loses_two_ranks_needs_two_spares() -> None:
    simulated = SimulatedJob(world_size=2, num_spares=2)
    simulated._withheld.add((3, WorkerReady))
    simulated.bring_all(1, Phase.UPDATED)
    job = as_job(simulated)

    async def is_answered(faults: str) -> bool:
        injector = OutsideInjector(parse(faults, 2), awaits_spares=True)
        waiting = asyncio.create_task(injector._warm_spare(job))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        injector._is_over = True
        assert await waiting
        return bool(done)

    assert num_warm_spares(job) == 1
    assert spare_will_come(job)
    one = "kill@step=3,phase=forward,rank=0;kill@step=4,phase=forward,rank=1"
    two = "kill@step=3,phase=forward,rank=0;kill@step=3,phase=backward,rank=1"
    assert asyncio.run(is_answered(one))
    assert not asyncio.run(is_answered(two))
    simulated.release()
    simulated.settle()
    assert num_warm_spares(job) == 2
    assert not spare_will_come(job)
    assert asyncio.run(is_answered(two))


# ---- what the ranks do ----------------------------------------------------------------------------------------------


class Page:
    """Counts what would be seen on the tag page."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.num_waits = 0

    def set_waiting(self, waiting: bool) -> None:
        self.is_waiting = waiting
        self.num_waits += waiting

    def progress(self) -> None:
        assert self.is_waiting


class Worker:
    """A rank that moves through its steps, with an injector that watches it."""

    framework_step: int | None = None

    def __init__(self, run_dir: Path, *faults: DrillFault, rank: int = 0) -> None:
        write_plan(run_dir, list(faults))
        self.page: Any = Page()
        self.machine = WorkerMachine(0, 4711, rank)
        self.machine.steps.restored(0)
        self.observe: Callable[[str], None] = lambda moment: None
        self.injector = WorkerInjector(self, run_dir, world_size=2)

    def digests(self) -> dict[str, str]:
        return {}

    def wait_until_interrupted(self, timeout_s: float) -> None:
        pytest.fail("nothing is staged here")

    def step(self) -> int:
        """Does a step and returns how often a spare was waited for by then."""
        events = [StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN, StepEvent.GRADIENTS_SYNCED, StepEvent.BARRIER_LEFT]
        for event in [*events, StepEvent.STEP_COMPLETED]:
            self.machine.steps.advance(event)
            self.injector.observe(str(self.machine.steps.phase))
        return self.page.num_waits


def serving(run_dir: Path, answer: Callable[[], Any], work: Callable[[], Any]) -> Any:
    async def whole() -> Any:
        async with control.serve(run_dir, answer, SPARES_SOCKET):
            return await asyncio.to_thread(work)

    return asyncio.run(whole())


def test_ranks_wait_between_the_steps_before_a_fault_and_only_there(tmp_path: Path) -> None:
    worker = Worker(tmp_path, KILL)
    waits = serving(tmp_path, lambda: True, lambda: [worker.step() for _step in range(4)])
    assert waits == [0, 0, 1, 2], "it has not come in its step, and is due in the next one"
    assert claim(tmp_path, KILL, 1.0)
    assert [worker.step() for _step in range(2)] == [2, 2]
    assert not worker.page.is_waiting


def test_a_fault_in_the_first_step_is_awaited_before_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, DrillFault(number=0, kind="kill", step=0, phase="synced", rank=1))
    assert serving(tmp_path, lambda: True, lambda: [worker.step(), worker.step()]) == [2, 3]


def test_no_rank_waits_for_a_fault_that_has_come_about(tmp_path: Path) -> None:
    worker = Worker(tmp_path, KILL)
    claim(tmp_path, KILL, 1.0)
    assert serving(tmp_path, lambda: True, lambda: [worker.step() for _step in range(5)]) == [0] * 5


def test_a_fault_from_outside_holds_the_ranks(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert serving(tmp_path, lambda: True, worker.step) == 0
    (tmp_path / HOLD_FILE).touch()
    assert serving(tmp_path, lambda: True, worker.step) == 1


def test_without_the_socket_no_rank_waits(tmp_path: Path) -> None:
    worker = Worker(tmp_path, KILL)
    assert [worker.step() for _step in range(4)] == [0, 0, 0, 0]


def test_the_wait_ends_when_another_rank_fails(tmp_path: Path) -> None:
    worker = Worker(tmp_path, KILL)
    never = asyncio.Event()

    async def answer() -> None:
        worker.machine.collective_failed("world", "a peer is gone")
        await never.wait()

    async def whole() -> None:
        async with control.serve(tmp_path, answer, SPARES_SOCKET):
            await asyncio.to_thread(await_spare, worker, tmp_path)
            never.set()

    asyncio.run(whole())
    assert worker.machine.interrupted
    assert worker.page.num_waits == 1


# ---- both together --------------------------------------------------------------------------------------------------


def test_the_launcher_answers_when_a_spare_is_warm(tmp_path: Path) -> None:
    simulated = starting()
    worker = Worker(tmp_path, KILL)
    injector = OutsideInjector([], awaits_spares=True)

    async def whole() -> None:
        asked = asyncio.Event()

        async def answer() -> bool:
            asked.set()
            return await injector._warm_spare(as_job(simulated))

        async with control.serve(tmp_path, answer, SPARES_SOCKET):
            waiting = asyncio.create_task(asyncio.to_thread(await_spare, worker, tmp_path))
            await asked.wait()
            assert not waiting.done()
            simulated.release()
            simulated.settle()
            await waiting

    asyncio.run(whole())
    assert worker.page.num_waits == 1


def test_each_replacement_is_slow_in_its_first_forward_after_the_fault_before_it(tmp_path: Path) -> None:
    slow = parse("kill@step=9,phase=forward,rank=1; pause@during=forward,rank=0,seconds=0.01", 2)
    worker = Worker(tmp_path, *slow)
    fired: list[DrillFault] = []

    def replaced() -> None:
        worker.injector = WorkerInjector(worker, tmp_path, world_size=2)
        worker.injector._fire = fired.append  # type: ignore[method-assign]  # it is only counted
        worker.injector._is_start = lambda: False  # type: ignore[method-assign]  # in a later generation
        for _step in range(2):
            worker.step()

    replaced()
    assert not fired  # the kill has not come about
    claim(tmp_path, slow[0], 1.0)
    replaced()
    replaced()
    assert fired == [slow[1], slow[1]]


def test_a_pause_needs_no_spare(tmp_path: Path) -> None:
    worker = Worker(tmp_path, *parse("pause@step=3,phase=forward,rank=0,seconds=0.01", 2))
    assert serving(tmp_path, lambda: True, lambda: [worker.step() for _step in range(5)]) == [0] * 5
    assert (tmp_path / "fired-0").exists()
