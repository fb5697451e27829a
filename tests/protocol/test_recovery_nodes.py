"""The controller's machine with several nodes: where processes are placed, and what the loss of a node comes to."""

import pytest
from tests.protocol.simulated_job import SimulatedJob, three_nodes
from tests.protocol.simulated_worker import WorkerState

from keepstep.protocol.messages import (
    Abandon,
    Cause,
    CollectiveFailed,
    Complete,
    GroupsReset,
    StartWorker,
    StateRecovered,
    StateRescued,
    StepsFinished,
    Stop,
    WorkerDone,
    WorkerFenced,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.processes import MAX_SPARE_FAILURES

IN_A_STEP = [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED]


def placed(job: SimulatedJob) -> dict[str, list[int | None]]:
    """For each node the ranks of the workers that were started there, None for a spare, in the order of their start."""
    where: dict[str, list[int | None]] = {}
    for effect in job.effects:
        if isinstance(effect.order, StartWorker):
            where.setdefault(str(effect.node), []).append(effect.order.rank)
    return where


# ---- Placement ------------------------------------------------------------------------------------------------------


def test_ranks_are_placed_node_by_node_and_spares_where_there_is_room() -> None:
    job = SimulatedJob(world_size=4, num_spares=2, nodes={"a": 2, "b": 2, "c": 2}).settle()
    assert placed(job) == {"a": [0, 1], "b": [2, 3], "c": [None, None]}
    job.finish_well()


def test_a_node_gets_no_more_ranks_than_were_asked_for() -> None:
    job = SimulatedJob(world_size=3, num_spares=3, nodes={"a": 2, "b": 2, "c": 2}, ranks_per_node=1).settle()
    assert placed(job) == {"a": [0, None], "b": [1, None], "c": [2, None]}
    assert placed(three_nodes().settle()) == {"a": [0, 1], "b": [2, 3, None], "c": [None, None]}


def test_nothing_is_started_before_there_is_room_for_all() -> None:
    job = SimulatedJob(world_size=4, num_spares=1, nodes={"a": 2})
    for name, slots in (("b", 2), ("c", 1)):
        assert job.join().effects == []
        job.offer(name, slots)
    assert job.join().where == (Stage.STARTING, 1)
    assert placed(job) == {"a": [0, 1], "b": [2, 3], "c": [None]}


def test_ranks_do_not_wait_for_ever_for_the_room_of_spares() -> None:
    job = SimulatedJob(world_size=4, num_spares=2, nodes={"a": 2, "b": 2}, start_s=50.0).join()
    assert job.effects == []
    joined_s = job.now_s - 0.001
    job.deadline()
    assert job.now_s == pytest.approx(joined_s + job.machine.settings.spares_grace_s)
    assert placed(job) == {"a": [0, 1], "b": [2, 3]}
    assert job.settle().where == (Stage.TRAINING, 1)
    job.offer("c", 9)
    job.settle()
    assert placed(job)["c"] == [None, None]


@pytest.mark.parametrize(("ranks_per_node", "room"), [(None, 3), (1, 2)])
def test_too_little_room_for_the_ranks_ends_the_job_at_the_deadline(ranks_per_node: int | None, room: int) -> None:
    job = SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2, "b": 1}, ranks_per_node=ranks_per_node).join()
    job.deadline()
    assert job.ended is not None
    assert job.ended.exit_code == 1
    assert job.ended.reason == f"4 ranks were asked for, and the nodes that have joined hold {room}"


def test_a_node_that_is_lost_before_the_start_has_no_room_to_offer() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1}).join()
    job.lose_node("a")
    job.settle()
    job.offer("b", 1)
    assert job.settle().effects == []
    job.offer("a", 1)
    job.settle()
    assert placed(job) == {"b": [0], "a": [1]}
    job.finish_well()


# ---- Which spare ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "hang", "throw"])
@pytest.mark.parametrize(("rank", "spare"), [(0, 4), (2, 5)])
def test_a_fault_of_the_software_prefers_a_spare_of_its_own_node(fault: str, rank: int, spare: int) -> None:
    """The state stays within the node, and the node itself is sound."""
    job = SimulatedJob(world_size=4, num_spares=2, nodes={"a": 3, "b": 3}, ranks_per_node=2)
    job.bring_all(3, Phase.BACKWARD)
    getattr(job, fault)(job.holder(rank))
    job.settle()
    assert job.machine.records[-1].replacements == {rank: spare}
    assert job.holder(rank).node == "ab"[rank // 2]
    job.finish_well()


RACKS = {"x/rack-2": 1, "a/rack-1": 1, "b/rack-1": 1, "c/rack-2": 1}


def test_without_a_spare_on_its_node_a_fault_of_the_software_prefers_its_failure_domain() -> None:
    for rank, spare in ((1, 2), (0, 3)):
        job = SimulatedJob(world_size=2, num_spares=2, nodes=RACKS).bring_all(3, Phase.BACKWARD)
        job.kill(job.holder(rank))
        job.settle()
        assert job.machine.records[-1].replacements == {rank: spare}


def test_a_lost_node_prefers_a_spare_of_another_failure_domain() -> None:
    """What took the node may take its neighbours next."""
    for node, rank, spare in (("a", 1, 3), ("x", 0, 2)):
        job = SimulatedJob(world_size=2, num_spares=2, nodes=RACKS).bring_all(3, Phase.BACKWARD)
        job.lose_node(node)
        job.settle()
        assert job.machine.records[-1].replacements == {rank: spare}
        job.finish_well()


def test_a_fresh_process_is_started_on_the_same_node_after_a_fault_of_the_software() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1, "b": 5}, ranks_per_node=1)
    job.bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(0))
    assert job.settle().where == (Stage.TRAINING, 2)
    assert placed(job) == {"a": [0, None], "b": [1]}
    job.finish_well()


# ---- A lost node ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", IN_A_STEP)
def test_a_node_that_is_lost_with_ranks_and_spares_is_one_failure(phase: Phase) -> None:
    job = three_nodes().bring_all(3, phase)
    job.lose_node("b")
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert len(job.orders(Stop)) == 1
    assert record.cause == Cause.NODE
    assert record.detail == "ranks 2 and 3 lost: node b lost: not heard of"
    assert [(failure.rank, failure.cause) for failure in record.failures] == [(2, "node lost"), (3, "node lost")]
    assert record.replacements == {2: 4, 3: 6}
    assert record.resume_step == (3 if phase in (Phase.FORWARD, Phase.BACKWARD) else 4)
    job.finish_well()


def test_a_peer_that_notices_before_the_lease_expires_makes_no_second_failure_of_it() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    job.say(CollectiveFailed(0, 1, "world", "connection reset by peer"))
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert record.cause == Cause.NODE
    job.finish_well()


def test_a_node_with_nothing_but_spares_is_replaced_and_no_rank_stops() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.offer("d", 9)
    job.settle()
    job.lose_node("c")
    job.settle()
    assert (job.where, job.orders(Stop)) == ((Stage.TRAINING, 1), [])
    assert placed(job)["d"] == [None, None]
    job.finish_well()


def test_a_node_lost_in_start_up_restarts_all_ranks_once_there_is_room() -> None:
    job = three_nodes().join()
    job.withhold(job.workers[0], WorkerReady)
    job.settle()
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.offer("d", 3)
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    assert len(job.machine.records) == 1
    job.finish_well()


def test_a_node_lost_while_the_job_is_being_stopped_belongs_to_the_same_generation() -> None:
    """Its ranks have reported their safe points already, so no process waits for them any more."""
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(1), WorkerFenced)
    job.hang(job.holder(1))
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.release()
    job.offer("d", 3)
    assert job.settle().where == (Stage.TRAINING, 2)
    assert [failure.rank for failure in job.machine.records[-1].failures] == [1, 2, 3]
    job.finish_well()


def test_a_node_lost_when_all_stand_still_is_not_decided_upon_without_it() -> None:
    """What they wait for is a fresh process; the lost spare must not set the decision off before the lost ranks."""
    job = SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2, "b": 3}, ranks_per_node=2)
    job.bring_all(3, Phase.BACKWARD)
    job.offer("d", 9)
    job.settle()
    job.kill(job.holder(2))
    while 4 not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[4], WorkerReady)
    job.settle()
    assert (job.where, job.workers[4].node) == ((Stage.STOPPING, 2), "b")
    job.lose_node("b")
    assert job.settle().where == (Stage.TRAINING, 2)
    assert [failure.rank for failure in job.machine.records[-1].failures] == [2, 3]
    job.finish_well()


@pytest.mark.parametrize("held", [GroupsReset, StateRecovered])
def test_a_node_lost_during_recovering_begins_one_generation_from_the_top(held: type) -> None:
    """Only its ranks had not recovered: without them, the machine must not think that all have."""
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    for number in (2, 3, 5):
        job.withhold(job.workers[number], held)
    job.say(CollectiveFailed(0, 1, "world", "connection reset by peer"))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    assert [record.superseded for record in job.machine.records] == [True, False]
    job.finish_well()


def test_a_node_lost_with_the_only_ranks_that_have_not_finished_does_not_complete_the_job() -> None:
    job = three_nodes(num_steps=4).bring_all(3, Phase.UPDATED)
    for rank in (2, 3):
        job.withhold(job.holder(rank), StepsFinished)
    while move := next((move for what, move in job.moves(training=True) if "TRAINING" in what), None):
        move()
        job.settle()
    assert [job.holder(rank).state for rank in (0, 1)] == [WorkerState.FINISHED, WorkerState.FINISHED]
    job.lose_node("b")
    job.settle()
    assert job.orders(Complete) == []
    assert job.where == (Stage.TRAINING, 2)
    job.finish_well()


def test_a_node_lost_after_the_last_step_fails_the_job_once() -> None:
    job = three_nodes(num_steps=2).bring_all(1, Phase.UPDATED)
    for worker in job.workers.values():
        job.withhold(worker, WorkerDone)
    while job.machine.stage is Stage.TRAINING:
        next(job.moves(training=True))[1]()
    job.settle()
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.FINISHED, 1)
    assert job.handed_to(Abandon) == [(0, 1)]
    job.release()
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 1
    assert "rank 2 failed in the code after the last step: node b lost" in job.ended.reason


def test_a_node_lost_while_rescuing_is_not_waited_for() -> None:
    job = SimulatedJob(world_size=3, num_spares=0, nodes={"a": 1, "b": 1, "c": 1}, max_restarts=0)
    job.bring_all(3, Phase.BACKWARD)
    for worker in job.workers.values():
        job.withhold(worker, StateRescued)
    job.kill(job.holder(2))
    job.settle()
    assert job.machine.stage is Stage.RESCUING
    job.lose_node("b")
    job.release()
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 76
    assert job.ended.reason.endswith("state saved: rescued-0-at-3.pt")


def test_after_the_end_and_before_the_start_a_lost_node_means_nothing() -> None:
    job = SimulatedJob(world_size=2, num_steps=2).finish()
    assert job.machine.node_lost("node-a", "not heard of", job.now_s, job.now_s) == []
    assert SimulatedJob().machine.node_lost("node-a", "not heard of", 1.0, 1.0) == []


def test_a_process_that_cannot_be_killed_is_gone_with_its_node() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(2), WorkerFenced)
    job.hang(job.holder(2))
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.lose_node("b")
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_all_nodes_but_one_may_be_lost_one_after_the_other_and_come_back() -> None:
    job = three_nodes().settle()
    slots = {"a": 2, "b": 3, "c": 2}
    for step, name in enumerate(["b", "a", "c", "b", "a"]):
        job.bring_all(step, Phase.UPDATED)
        job.lose_node(name)
        job.settle()
        job.offer(name, slots[name])
        assert job.settle().machine.stage is Stage.TRAINING
    job.finish_well()


# ---- Waiting for room -----------------------------------------------------------------------------------------------


def waiting_for_room(**options: float) -> SimulatedJob:
    """Rank 1 is lost with its node, and there is room for it nowhere."""
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1, "b": 1}, **options).bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    assert job.machine.roster.num_free == 0
    return job


def test_where_there_is_no_room_the_survivors_wait_for_a_node_that_joins() -> None:
    job = waiting_for_room()
    num_started = len(job.orders(StartWorker))
    job.offer("c", 1)
    assert job.settle().where == (Stage.TRAINING, 2)
    assert placed(job)["c"] == [None]
    assert len(job.orders(StartWorker)) == num_started + 1
    assert job.machine.records[-1].actions == {0: "stay", 1: "restore"}
    job.finish_well()


def test_nodes_that_come_and_go_do_not_put_the_end_off() -> None:
    job = waiting_for_room(start_s=50.0)
    due = job.machine.next_deadline()
    for name in ("c", "d"):
        job.now_s += 20.0
        job.offer(name, 1)
        job.join()
        job.lose_node(name)
        job.settle()
        assert job.where == (Stage.STOPPING, 2)
        assert job.machine.next_deadline() == due
    job.deadline()
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 76


def test_nodes_that_come_and_go_do_not_put_the_end_off_where_all_ranks_restart() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1, "b": 1}, checkpoint_every=2, start_s=50.0)
    job.bring_all(3, Phase.BACKWARD)
    for name in ("a", "b"):
        job.lose_node(name)
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    due = job.machine.next_deadline()
    for name in ("c", "d"):
        job.now_s += 20.0
        job.offer(name, 1)
        job.settle()
        job.lose_node(name)
        job.settle()
        assert job.where == (Stage.STOPPING, 2)
        assert job.machine.next_deadline() == due
    job.deadline()
    assert job.ended is not None
    assert job.ended.exit_code == 76


def test_room_that_never_comes_ends_in_a_rescue() -> None:
    job = waiting_for_room(start_s=50.0)
    due = job.machine.next_deadline()
    assert due is not None
    assert due - job.now_s == pytest.approx(50.0, abs=0.1)
    job.deadline()
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 76
    assert job.ended.reason.endswith("state saved: rescued-0-at-3.pt")


def test_fresh_processes_that_go_down_with_their_nodes_are_not_taken_for_ones_that_keep_failing() -> None:
    """So many in a row would end the job; but nothing is wrong with them."""
    job = waiting_for_room()
    for index in range(2 + MAX_SPARE_FAILURES):
        job.offer(f"n{index}", 1)
        job.join()
        assert job.workers[2 + index].node == f"n{index}"
        job.lose_node(f"n{index}")
        job.settle()
    job.offer("c", 1)
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_when_all_ranks_restart_spares_make_room_for_them() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, nodes={"a": 1, "b": 2}).settle()
    job.lose_node("a")
    job.kill(job.holder(1))
    assert job.settle().where == (Stage.TRAINING, 2)
    assert placed(job) == {"a": [0], "b": [1, None, 0, 1]}
    job.finish_well()


def test_when_all_ranks_restart_a_node_that_is_too_small_is_not_filled_with_spares() -> None:
    job = SimulatedJob(world_size=4, num_spares=1, nodes={"a": 3, "b": 2}, max_restarts=4).settle()
    job.lose_node("a")
    job.kill(job.holder(3))
    for name in ("c", "d"):
        assert job.settle().where == (Stage.STOPPING, 2)
        assert len(job.orders(StartWorker)) == 5
        job.offer(name, 1)
    assert job.settle().where == (Stage.TRAINING, 2)
    assert placed(job) == {"a": [0, 1, 2], "b": [3, None, 0, 1], "c": [2], "d": [3]}
    job.finish_well()
