"""Nodes and devices that fail again and again are used only when no other spare is left, until they have been quiet."""

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.protocol.messages import Cause, NodeJoined, StartWorker, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.placement.quarantine import Place, Quarantine

WINDOW_S = 100.0
A, A_1 = Place("a"), Place("a", 1)


@pytest.mark.parametrize(("times", "is_held"), [((0.0, 99.0), True), ((0.0, 100.0), False), ((0.0, 99.0, 120.0), True)])
def test_so_many_failures_within_the_window(times: tuple[float, ...], is_held: bool) -> None:
    quarantine = Quarantine(2, WINDOW_S)
    for at_s in times:
        quarantine.release(at_s)
        quarantine.failed(A, "lost", at_s)
    assert (A in quarantine.held) is is_held


def test_it_says_how_often_and_why() -> None:
    quarantine = Quarantine(2, WINDOW_S)
    quarantine.failed(A_1, "killed by SIGSEGV", 0.0)
    quarantine.failed(A_1, "exit code 1", 1.0)
    assert quarantine.held == {A_1: "failed 2 times within 100 s, last: exit code 1"}
    assert [str(A), str(A_1)] == ["node a", "device 1 of node a"]


def test_it_ends_after_a_quiet_window() -> None:
    quarantine = Quarantine(2, WINDOW_S)
    for at_s in (0.0, 60.0):
        quarantine.failed(A, "lost", at_s)
    quarantine.release(159.0)
    assert A in quarantine.held
    quarantine.release(160.0)
    assert quarantine.held == {}


def test_nothing_is_held_where_it_is_off() -> None:
    quarantine = Quarantine(0, WINDOW_S)
    for _ in range(5):
        quarantine.failed(A, "lost", 0.0)
    assert quarantine.held == {}
    assert quarantine.penalty("a", 1) == 0


def test_a_node_weighs_more_than_a_device() -> None:
    quarantine = Quarantine(1, WINDOW_S)
    quarantine.failed(A_1, "lost", 0.0)
    assert [quarantine.penalty("a", device) for device in (0, 1)] == [0, 1]
    quarantine.failed(A, "lost", 0.0)
    assert [quarantine.penalty("a", device) for device in (0, 1)] == [2, 2]
    assert quarantine.penalty("b", 0) == 0


# ---- what follows from it -------------------------------------------------------------------------------------------


def lose_again(job: SimulatedJob, name: str, slots: int) -> None:
    """A node is lost, and comes back as sick as it left."""
    job.bring_all(job.machine.progress.trained_to, Phase.BACKWARD)
    job.lose_node(name)
    job.settle()
    job.offer(name, slots)
    assert job.settle().machine.stage is Stage.TRAINING


def test_a_node_that_was_lost_twice_gets_no_spare_where_another_can_hold_it() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"a": 1, "b": 1, "c": 1}, ranks_per_node=1).settle()
    lose_again(job, "b", 1)  # c takes the rank, b is the spare again
    assert job.machine.quarantine.held == {}
    lose_again(job, "b", 1)  # as a spare
    assert job.machine.quarantine.held == {Place("b"): "failed 2 times within 3600 s, last: node b lost: not heard of"}
    assert [spare.node for spare in job.machine.roster.spares()] == ["b"]  # there is no other place
    job.offer("d", 1)
    job.settle()
    assert [spare.node for spare in job.machine.roster.spares()] == ["b", "d"]
    job.kill(job.holder(1))
    job.settle()
    assert job.holder(1).node == "d"
    job.finish_well()


def test_a_node_in_quarantine_is_taken_where_there_is_nothing_else() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1, "b": 1}).settle()
    lose_again(job, "b", 1)
    lose_again(job, "b", 1)
    assert Place("b") in job.machine.quarantine.held
    assert job.holder(1).node == "b"
    job.finish_well()


def lose_rank_1(job: SimulatedJob, steps: range) -> list[int]:
    """It is lost in each of these steps; returns the devices of the processes that were started for it."""
    num_before = len(job.effects)
    for step in steps:
        job.bring_all(step, Phase.UPDATED)
        job.kill(job.holder(1))
        assert job.settle().machine.stage is Stage.TRAINING
    return [effect.order.device for effect in job.effects[num_before:] if isinstance(effect.order, StartWorker)]


def test_a_device_that_failed_twice_is_the_last_of_its_node() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"b": 1, "a": 3}, ranks_per_node=1).settle()
    assert lose_rank_1(job, range(4)) == [0, 1, 1, 2]
    assert [str(place) for place in job.machine.quarantine.held] == ["device 0 of node a", "device 1 of node a"]
    assert lose_rank_1(job, range(4, 6)) == [2, 0]
    job.finish_well()


@pytest.mark.parametrize(("num_devices", "held"), [(0, []), (2, ["device 1 of node node-a"])])
def test_only_devices_that_exist_are_in_quarantine(num_devices: int, held: list[str]) -> None:
    """The slots of a node without devices are none, nor are those of spares that are parked beside them."""
    job = SimulatedJob(world_size=2, num_spares=0, nodes={NODE: 3})
    job.reports["agent", NODE][0] = NodeJoined(NODE, 3, "", 0, 0, (), num_devices)
    lose_rank_1(job, range(6))
    assert [str(place) for place in job.machine.quarantine.held] == held
    job.finish_well()


def test_a_warm_spare_on_a_doubtful_device_comes_after_one_on_another_node() -> None:
    job = SimulatedJob(world_size=2, num_spares=2, nodes={"a": 3, "b": 1}, ranks_per_node=2, quarantine_failures=1)
    job.bring_all(3, Phase.BACKWARD)
    assert job.machine.roster.workers[2].device == 2
    job.kill(job.workers[2])  # the spare on node a: another is started there
    job.settle()
    job.kill(job.holder(0))
    job.settle()
    assert job.holder(0).node == "b"
    job.finish_well()


def test_a_worker_that_ends_by_the_signal_of_a_drain_is_no_failure_of_its_device() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, quarantine_failures=1).join()
    job.machine.drain_asked("SIGTERM", job.now_s)
    assert job.machine.stage is Stage.DRAINING
    job.say(WorkerLost(0, Cause.SIGNAL, "killed by SIGTERM", True, None, job.now_s))
    assert job.machine.roster.workers[0].lost
    assert job.machine.quarantine.held == {}
