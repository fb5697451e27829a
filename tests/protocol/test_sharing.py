"""Ranks that share devices because nodes are gone, and get their own again when nodes are back."""

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import Cause, Stop
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage


def devices(job: SimulatedJob) -> dict[int, tuple[str, int]]:
    """rank -> the node and device of its holder."""
    holders = sorted((worker.rank or 0, worker) for worker in job.machine.roster.holders())
    return {rank: (worker.node, worker.device) for rank, worker in holders}


def two_nodes(**options: object) -> SimulatedJob:
    """Two ranks on each of two nodes, of which one is enough."""
    settings = {"ranks_per_node": 2, "most_per_node": 4, **options}
    return SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2, "b": 2}, **settings)


def test_the_ranks_of_a_lost_node_share_the_devices_of_the_other() -> None:
    job = two_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    assert job.settle().where == (Stage.TRAINING, 2)
    assert devices(job) == {0: ("a", 0), 1: ("a", 1), 2: ("a", 2), 3: ("a", 3)}
    job.finish_well()


def test_without_leave_to_share_they_wait() -> None:
    job = two_nodes(most_per_node=0).bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    assert job.settle().where == (Stage.STOPPING, 2)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.UPDATED])
def test_when_the_node_is_back_the_ranks_go_back(phase: Phase) -> None:
    job = two_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    job.settle()
    job.bring_all(6, phase)
    job.offer("b", 2)
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    assert len(job.orders(Stop)) == 2, "both in one recovery"
    assert devices(job) == {0: ("a", 0), 1: ("a", 1), 2: ("b", 0), 3: ("b", 1)}
    record = job.machine.records[-1]
    assert {failure.cause for failure in record.failures} == {Cause.MOVED}
    assert record.detail == "ranks 2 and 3 lost: it shared a device, and another one is free"
    assert job.machine.quarantine.held == {}
    job.finish_well()


def test_a_node_with_less_room_takes_as_many_as_it_can() -> None:
    job = two_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    job.settle()
    job.offer("c", 1)
    job.settle()
    assert sorted(node for node, _ in devices(job).values()) == ["a", "a", "a", "c"]
    job.offer("d", 1)
    job.settle()
    assert sorted(node for node, _ in devices(job).values()) == ["a", "a", "c", "d"]
    job.finish_well()


def test_the_only_holder_of_a_shard_stays_where_it_is() -> None:
    """No other rank could give its state to the one that takes its place."""
    job = SimulatedJob(
        world_size=2, num_spares=0, nodes={"a": 1}, most_per_node=2, shards=lambda rank: str(rank), ranks_per_node=1
    ).join()
    job.deadline()
    assert job.settle().where == (Stage.TRAINING, 1)
    job.offer("b", 1)
    assert job.settle().where == (Stage.TRAINING, 1)
    assert devices(job) == {0: ("a", 0), 1: ("a", 1)}
    job.finish()


def test_a_job_begins_with_too_few_nodes_when_the_others_do_not_come() -> None:
    job = SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2}, most_per_node=4, ranks_per_node=2).join()
    assert job.effects == []
    begun_s = job.now_s
    job.deadline()
    assert job.now_s == pytest.approx(begun_s + job.machine.settings.spares_grace_s, abs=0.1)
    assert job.settle().where == (Stage.TRAINING, 1)
    assert devices(job) == {rank: ("a", rank) for rank in range(4)}
    job.finish()


def test_nodes_that_are_back_hold_spares_once_every_rank_has_a_device() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"a": 1, "b": 1, "c": 1}, most_per_node=2, ranks_per_node=1)
    job.bring_all(3, Phase.BACKWARD)
    for name in ("c", "b"):
        job.lose_node(name)
        job.settle()
    assert devices(job) == {0: ("a", 0), 1: ("a", 1)}
    for name in ("b", "c"):
        job.offer(name, 1)
        job.settle()
    assert devices(job) == {0: ("a", 0), 1: ("b", 0)}
    assert [spare.node for spare in job.machine.roster.spares()] == ["c"]
    job.finish_well()
