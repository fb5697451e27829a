"""Devices that their agent has closed: nothing is started there, and ranks leave them."""

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.protocol.messages import Cause, DevicesClosed, NodeJoined, StartWorker, Stop, Tag, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS, RecoverySettings, Stage
from keepstep.protocol.recovery.placement.quarantine import Quarantine
from keepstep.protocol.recovery.placement.roster import Roster

REASON = "GPU 1 (GPU-b): Xid 79: GPU has fallen off the bus"


def started(job: SimulatedJob) -> list[tuple[str | None, int]]:
    """Where processes were started, in this order."""
    return [(effect.node, effect.order.device) for effect in job.effects if isinstance(effect.order, StartWorker)]


def devices(job: SimulatedJob) -> dict[int, tuple[str, int]]:
    """rank -> the node and device of its holder."""
    return {worker.rank or 0: (worker.node, worker.device) for worker in job.machine.roster.holders()}


def close(job: SimulatedJob, device: int, node: str = NODE) -> None:
    """The agent closes a device; what is on it may go on."""
    job.say(DevicesClosed(node, (device,), REASON))


def fail(job: SimulatedJob, rank: int) -> int:
    """The device of a rank fails, as its agent tells it; returns the device."""
    holder = next(worker for worker in job.machine.roster.holders() if worker.rank == rank)
    process = job.workers[holder.worker]
    tag = Tag(process.generation, process.step, process.phase)
    job.say(WorkerLost(holder.worker, Cause.DEVICE, REASON, False, tag, job.now_s))
    close(job, holder.device, holder.node)
    return holder.device


# ---- The rank on it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED])
def test_the_rank_of_a_failed_device_goes_to_a_spare_and_nothing_comes_back_there(phase: Phase) -> None:
    job = SimulatedJob(num_spares=1, nodes={NODE: 6}).bring_all(3, phase)
    device = fail(job, 1)
    job.settle()
    record = job.machine.records[-1]
    assert (record.cause, record.detail) == (Cause.DEVICE, f"rank 1 lost: {REASON}")
    assert record.failures[0].phase == phase
    assert job.where == (Stage.TRAINING, 2)
    for _ in range(2):
        job.kill(job.holder(1))
        job.settle()
        job.bring_all(job.machine.progress.resume_at + 1, Phase.FORWARD)
    assert device not in [each for _, each in started(job)[4:]]
    job.finish_well()


def test_a_rank_on_a_closed_device_moves_to_a_warm_spare_in_one_recovery() -> None:
    job = SimulatedJob(num_spares=1).bring_all(3, Phase.BACKWARD)
    close(job, 2)
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert devices(job) == {0: (NODE, 0), 1: (NODE, 1), 2: (NODE, 3)}
    record = job.machine.records[-1]
    assert (record.cause, record.detail) == (Cause.MOVED, f"rank 2 lost: its device is sick: {REASON}")
    assert job.machine.quarantine.held == {}
    job.finish_well()


def test_without_a_spare_the_rank_stays_until_there_is_one() -> None:
    job = SimulatedJob(num_spares=0).bring_all(3, Phase.BACKWARD)
    close(job, 2)
    job.settle()
    assert job.where == (Stage.TRAINING, 1)
    job.bring_all(6, Phase.BACKWARD)
    job.offer("b", 1)
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert devices(job)[2] == ("b", 0)
    job.finish_well()


def test_the_only_holder_of_a_shard_stays() -> None:
    job = SimulatedJob(num_spares=1, shards=str).bring_all(3, Phase.BACKWARD)
    close(job, 2)
    assert job.settle().where == (Stage.TRAINING, 1)
    job.finish_well()


# ---- Spares ---------------------------------------------------------------------------------------------------------


def test_a_spare_on_a_closed_device_ends_and_another_one_starts_elsewhere() -> None:
    job = SimulatedJob(num_spares=1, nodes={NODE: 5}).bring_all(3, Phase.BACKWARD)
    close(job, 3)
    job.settle()
    assert job.orders(Stop) == []
    assert started(job)[-1] == (NODE, 4)
    job.kill(job.holder(0))
    job.settle()
    assert devices(job)[0] == (NODE, 4)
    job.finish_well()


def test_where_the_only_spare_is_on_a_closed_device_none_is_left() -> None:
    job = SimulatedJob(num_spares=1).bring_all(3, Phase.BACKWARD)
    close(job, 3)
    job.settle()
    assert len(job.machine.roster.spares()) == 0
    job.kill(job.holder(0))
    job.settle()
    assert devices(job)[0] == (NODE, 0), "a fresh process on the device that is free again"
    job.finish_well()


# ---- No room --------------------------------------------------------------------------------------------------------


def test_without_room_the_job_waits_for_a_node() -> None:
    job = SimulatedJob(num_spares=0).bring_all(3, Phase.BACKWARD)
    fail(job, 1)
    assert job.settle().where == (Stage.STOPPING, 2)
    job.offer("b", 1)
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_where_no_node_can_join_the_job_saves_its_state_and_ends_with_the_reason() -> None:
    job = SimulatedJob(num_spares=0, nodes_may_join=False).bring_all(3, Phase.BACKWARD)
    fail(job, 1)
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_TOO_FEW_RANKS
    assert job.ended.reason.startswith(
        f"the job cannot continue: no device is left for ranks [1]: rank 1 lost: {REASON}"
    )
    assert "state saved" in job.ended.reason
    assert job.num_deadlines == 0


def test_where_no_node_can_join_a_spare_is_waited_for() -> None:
    job = SimulatedJob(num_spares=1, nodes_may_join=False).bring_all(3, Phase.BACKWARD)
    fail(job, 1)
    assert job.settle().where == (Stage.TRAINING, 2)
    fail(job, 2)
    assert job.settle().ended is not None


def test_all_ranks_cannot_restart_without_their_devices() -> None:
    job = SimulatedJob(2, 0, checkpoint_every=2, shards=str, nodes_may_join=False).bring_all(3, Phase.BACKWARD)
    fail(job, 0)
    fail(job, 1)
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_TOO_FEW_RANKS
    assert "not enough devices left for 2 ranks" in job.ended.reason


# ---- From the start -------------------------------------------------------------------------------------------------


def test_a_node_may_join_with_closed_devices() -> None:
    job = SimulatedJob(2, 1, nodes={NODE: 4})
    job.reports["agent", NODE][0] = NodeJoined(NODE, 4, "", 0, 0, (1,), 4)
    job.settle()
    assert started(job) == [(NODE, 0), (NODE, 2), (NODE, 3)]
    job.finish_well()


def test_a_single_node_does_not_wait_for_the_room_of_its_spares() -> None:
    job = SimulatedJob(2, 1, nodes={NODE: 3}, nodes_may_join=False)
    job.reports["agent", NODE][0] = NodeJoined(NODE, 3, "", 0, 0, (1,), 3)
    job.settle()
    assert started(job) == [(NODE, 0), (NODE, 2)]
    job.finish_well()


# ---- The roster -----------------------------------------------------------------------------------------------------


def roster(slots: int, most: int, closed: tuple[int, ...] = ()) -> Roster:
    settings = RecoverySettings(2, 0, most_per_node=most)
    made = Roster(settings, Quarantine(0, 1.0))
    made.add_node(NodeJoined("a", slots, "", 0, 0, closed, slots))
    return made


def test_what_is_free_is_counted_right() -> None:
    books = roster(4, 0)
    first, second = books.add("a", None), books.add("a", None)
    assert books.num_free == 2
    assert books.close_devices("a", (1, 3), "sick") == [second]
    assert books.num_free == books.nodes["a"].num_free == 1
    books.mark_lost(second, gone=True)
    assert books.num_free == books.nodes["a"].num_free == 1
    books.mark_lost(first, gone=True)
    assert books.num_free == books.nodes["a"].num_free == 2
    books.close_devices("a", (1, 3), "once more")
    assert books.num_free == 2
    assert books.nodes["a"].devices() == ([0, 2], [])
    books.close_node("a")
    assert books.num_free == 0
    assert books.close_devices("a", (0,), "late") == []
    assert books.num_free == 0
    assert books.close_devices("gone", (0,), "late") == []


def test_devices_that_are_shared_are_closed_under_all_their_numbers() -> None:
    """Two devices, of which worker 2 shares the first and worker 3 the second."""
    books = roster(2, 4, closed=(1, 3))
    node = books.nodes["a"]
    assert (node.num_free, node.num_shareable, node.num_room) == (1, 1, 2)
    assert node.devices() == ([0], [2])
    assert [books.add("a", None).device for _ in range(2)] == [0, 2]
    assert node.num_room == 0
    assert books.least_oversubscribed() is None
