"""The controller's machine: several losses, losses in the middle of a recovery, hangs, and hints without a loss."""

import copy
import itertools

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob, three_nodes

from keepstep.protocol.messages import (
    Cause,
    CollectiveFailed,
    FenceWorker,
    GroupsReset,
    JobStalled,
    SafePointReached,
    StartWorker,
    StateRecovered,
    Stop,
    WorkerFenced,
    WorkerLost,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage

IN_A_STEP = [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED]


# ---- Several losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_spares", [0, 1, 2, 3])
@pytest.mark.parametrize("phase", IN_A_STEP)
def test_two_ranks_lost_at_once_are_both_replaced(phase: Phase, num_spares: int) -> None:
    job = SimulatedJob(world_size=3, num_spares=num_spares).bring_all(3, phase)
    job.kill(job.holder(0))
    job.kill(job.holder(2))
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert [failure.rank for failure in record.failures] == [0, 2]
    assert record.resume_step == (3 if phase in (Phase.FORWARD, Phase.BACKWARD) else 4)
    job.finish_well()


@pytest.mark.parametrize("phase", IN_A_STEP)
def test_survivors_learn_that_the_lost_rank_was_synced(phase: Phase) -> None:
    """What they still need for their own gradients was sent then, so they may end their backward."""
    job = SimulatedJob(world_size=2).bring_all(3, min(phase, Phase.SYNCED, key=IN_A_STEP.index)).bring(rank1=(3, phase))
    job.kill(job.holder(1))
    job.settle()
    (stop,) = job.orders(Stop)
    assert isinstance(stop, Stop)
    assert stop.synced_step == (None if phase in (Phase.FORWARD, Phase.BACKWARD) else 3)


@pytest.mark.parametrize("fault", ["kill", "hang", "throw"])
def test_a_loss_during_stopping_belongs_to_the_same_generation(fault: str) -> None:
    job = SimulatedJob(world_size=3, num_spares=2).bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(0), SafePointReached)
    job.withhold(job.holder(2), SafePointReached)
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    getattr(job, fault)(job.holder(2))
    job.settle()
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    assert [failure.rank for failure in job.machine.records[-1].failures] == [1, 2]
    assert len(job.orders(Stop)) == 1
    job.finish_well()


@pytest.mark.parametrize("held", [GroupsReset, StateRecovered])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_loss_during_recovering_begins_a_new_generation_from_the_top(held: type, rank: int) -> None:
    job = SimulatedJob(world_size=3, num_spares=2).bring_all(3, Phase.SYNCED)
    for worker in job.workers.values():
        job.withhold(worker, held)
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    job.kill(job.holder(rank))
    job.release()
    job.settle()
    first, second = job.machine.records
    assert job.where == (Stage.TRAINING, 3)
    assert (first.superseded, second.superseded) == (True, False)
    assert first.resume_step == second.resume_step == 4
    assert [failure.rank for failure in second.failures] == [rank]
    job.finish_well()


def test_a_half_restored_replacement_reaches_nothing() -> None:
    """With it alone there is no state left; with one whole copy beside it, it is restored again."""
    for lost, stage in (([0, 2], Stage.ENDED), ([0], Stage.TRAINING)):
        job = SimulatedJob(world_size=3, num_spares=3).bring_all(3, Phase.BACKWARD)
        job.withhold(job.workers[3], StateRecovered)
        job.kill(job.holder(1))
        job.settle()
        assert job.holder(1).partially_updated
        for rank in lost:
            job.kill(job.holder(rank))
        job.settle()
        job.release()
        assert job.settle().where == (stage, 3)


@pytest.mark.parametrize("held", [GroupsReset, StateRecovered])
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_depends_on_the_one_rank_with_complete_gradients(rank: int, held: type) -> None:
    """It undoes its step, and it or the other survivor is lost before it has sent anything."""
    job = SimulatedJob(world_size=3, num_spares=2).bring_all(3, Phase.BACKWARD).bring(rank0=(3, Phase.SYNCED))
    for worker in job.workers.values():
        job.withhold(worker, held)
    job.kill(job.holder(2))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    job.kill(job.holder(rank))
    job.settle()
    job.release()
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    assert [record.resume_step for record in job.machine.records] == [3, 3]
    job.finish_well()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_no_shard_depends_on_a_copy_that_is_still_to_come(rank: int) -> None:
    """Found by simulation. Of each of two shards one rank is synced. Had both run the update, rank 1 alone could have
    sent the new state of its shard; with it lost, the old state of one shard would have met the new one of the other.
    """
    job = SimulatedJob(world_size=4, num_spares=2, shards=lambda rank: "odd" if rank % 2 else "even")
    job.bring_all(3, Phase.BACKWARD).bring(rank0=(3, Phase.SYNCED), rank1=(3, Phase.SYNCED))
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.kill(job.holder(2))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    assert job.machine.records[-1].actions == {0: "stay", 1: "stay", 2: "restore", 3: "stay"}
    if rank == 0:  # the other copy of its shard is not whole yet
        job.release()
        job.settle()
    job.kill(job.holder(rank))
    job.settle()
    job.release()
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    assert [record.resume_step for record in job.machine.records] == [3, 3]
    job.finish_well()


def test_a_restored_replacement_is_a_source_like_any_other() -> None:
    job = SimulatedJob(world_size=2, num_spares=2).bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(0), StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    job.kill(job.holder(0))
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    assert job.machine.records[-1].actions == {0: "restore", 1: "stay"}
    job.finish_well()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(IN_A_STEP, IN_A_STEP)))
def test_a_second_loss_in_any_phase_of_the_step_after(first: Phase, second: Phase) -> None:
    job = SimulatedJob(world_size=2, num_spares=2).bring_all(3, first)
    job.kill(job.holder(0))
    job.settle().bring_all(5, second)
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.TRAINING, 3)
    job.finish_well()


# ---- A hang, and what only looks like a failure ---------------------------------------------------------------------


def test_a_hung_rank_is_fenced_before_anything_is_decided() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    hung = job.holder(1)
    job.withhold(hung, WorkerFenced)
    job.hang(hung)
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    assert [order.worker for order in job.orders(FenceWorker)] == [hung.number]
    assert job.machine.records[-1].decided_s is None
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_a_hung_rank_that_ends_by_itself_needs_no_word_of_the_fence() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    hung = job.holder(1)
    job.withhold(hung, WorkerFenced)
    job.hang(hung)
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.kill(hung)
    assert job.settle().where == (Stage.TRAINING, 2)
    assert len(job.machine.records[-1].failures) == 1


def test_a_lost_rank_whose_script_ends_after_all_is_gone_and_nothing_more() -> None:
    """Its rank belongs to another: it has not left the job early, and a later recovery must not think so."""
    job = SimulatedJob(world_size=2, num_spares=2).bring_all(3, Phase.BACKWARD)
    hung = job.holder(1)
    job.withhold(hung, WorkerFenced)
    job.hang(hung)
    job.settle()
    job.quit(hung)
    assert job.settle().where == (Stage.TRAINING, 2)
    job.bring_all(5, Phase.BACKWARD)
    job.kill(job.holder(0))
    assert job.settle().where == (Stage.TRAINING, 3)
    job.finish_well()


def test_a_loss_is_reported_twice_and_counts_once() -> None:
    job = SimulatedJob(world_size=3, num_spares=2).bring_all(3, Phase.BACKWARD)
    lost = job.holder(1)
    job.kill(lost)
    job.settle()
    before = copy.deepcopy(job.machine.records)
    job.say(WorkerLost(lost.number, Cause.SIGNAL, "killed by SIGKILL", True, None, job.now_s))
    assert (job.where, job.machine.records) == ((Stage.TRAINING, 2), before)


def test_a_failed_collective_stops_all_though_no_rank_is_lost() -> None:
    job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.say(CollectiveFailed(1, 1, "world", "connection reset by peer"))
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert (record.cause, record.failures) == ("collective failed", [])
    assert record.detail == "rank 1: group world: connection reset by peer"
    assert record.actions == {0: "stay", 1: "stay", 2: "stay"}
    assert len(job.orders(StartWorker)) == 4
    job.finish_well()


def test_a_hint_that_is_followed_by_the_loss_takes_its_cause() -> None:
    job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.say(CollectiveFailed(0, 1, "world", "connection reset by peer"))
    job.kill(job.holder(1))
    job.settle()
    (record,) = job.machine.records
    assert (record.cause, record.detail) == ("signal", "rank 1 lost: killed by SIGKILL")
    assert [failure.rank for failure in record.failures] == [1]


def test_the_cause_of_the_first_loss_stays_and_all_are_named() -> None:
    job = SimulatedJob(world_size=3, num_spares=2).bring_all(3, Phase.BACKWARD)
    job.throw(job.holder(1), "ValueError: bad batch")
    job.kill(job.holder(2))
    job.settle()
    (record,) = job.machine.records
    detail = "rank 1 lost: exit code 1: ValueError: bad batch; rank 2 lost: killed by SIGKILL"
    assert (record.cause, record.detail) == ("exception", detail)
    assert [failure.cause for failure in record.failures] == ["exception", "signal"]


def test_a_stalled_job_is_stopped_and_goes_on() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.BACKWARD)
    job.say(JobStalled(NODE, 1, "all 2 ranks wait"))
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert (record.cause, record.detail, record.failures) == ("stuck collective", "all 2 ranks wait", [])
    job.finish_well()


def test_in_a_stalled_job_the_one_that_cannot_even_stop_is_replaced() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    hung = job.holder(1)
    job.hang(hung, seen=False)
    job.say(JobStalled(NODE, 1, "all 2 ranks wait"))
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    job.hang(hung)
    assert job.settle().where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].actions == {0: "stay", 1: "restore"}


# ---- Several nodes that stand still ----------------------------------------------------------------------------------


def stall(job: SimulatedJob, node: str) -> None:
    job.say(JobStalled(node, job.machine.generation, f"all ranks of {node} wait"))


def test_a_job_that_is_stalled_in_the_same_step_again_ends_with_its_state_saved() -> None:
    """New groups have not helped: the ranks wait for each other in a way of the script."""
    job = SimulatedJob(world_size=2).bring_all(4, Phase.BACKWARD)
    for generation in (1, 2):
        job.say(JobStalled(NODE, generation, "all 2 ranks wait"))
        job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 76
    assert "all ranks wait in the same step again, with groups connected anew: all 2 ranks wait" in job.ended.reason


def test_a_job_that_has_completed_a_step_since_it_was_stalled_goes_on() -> None:
    job = SimulatedJob(world_size=2)
    for number in (1, 2, 3):
        job.bring_all(3 * number, Phase.BACKWARD)
        job.say(JobStalled(NODE, number, "all 2 ranks wait"))
        job.settle()
    job.finish()
    assert [each.cause for each in job.machine.records] == [Cause.STUCK] * 3
    assert job.ended is not None
    assert job.ended.exit_code == 0


def test_a_stall_counts_when_every_node_with_ranks_is_stalled() -> None:
    """Where one still moves, the rank to blame is there. Node c holds spares only, and has nothing to say."""
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    stall(job, "a")
    stall(job, "a")
    stall(job, "c")
    assert (job.where, job.orders(Stop)) == ((Stage.TRAINING, 1), [])
    stall(job, "b")
    job.settle()
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert (record.cause, record.detail, record.failures) == ("stuck collective", "all ranks of b wait", [])
    job.finish_well()


def test_a_stall_of_an_older_generation_does_not_count() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    stall(job, "a")
    job.kill(job.holder(3))
    job.settle()
    stall(job, "b")
    job.say(JobStalled("a", 1, "all ranks of a wait"))
    assert job.where == (Stage.TRAINING, 2)
    stall(job, "a")
    assert job.where == (Stage.STOPPING, 3)


def test_a_node_that_was_given_a_rank_is_asked_as_well() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    job.settle()
    stall(job, "a")
    assert job.where == (Stage.TRAINING, 2)
    stall(job, "c")
    assert job.where == (Stage.STOPPING, 3)
