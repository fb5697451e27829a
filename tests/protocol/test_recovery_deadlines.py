"""The controller's machine: every deadline, what comes of it, and that nothing waits without one."""

import pytest
from tests.protocol.simulated_job import SimulatedJob
from tests.protocol.simulated_worker import SimulatedWorker

from keepstep.protocol.messages import (
    Cause,
    FenceWorker,
    SafePointReached,
    StateMoves,
    StateRecovered,
    StateRescued,
    WorkerDone,
    WorkerFenced,
    WorkerLost,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage


def ended(job: SimulatedJob) -> tuple[int, str]:
    assert job.ended is not None, f"the job is still {job.machine.stage}"
    assert job.machine.next_deadline() is None
    return job.ended.exit_code, job.ended.reason


DEADLINES = {"start_s": 50.0, "stop_s": 40.0, "recover_s": 30.0, "end_s": 20.0}


def with_deadlines(world_size: int = 2, num_spares: int = 1, **options: int) -> SimulatedJob:
    return SimulatedJob(world_size, num_spares, **options, **DEADLINES)


def assert_due_in(job: SimulatedJob, seconds: float) -> None:
    """The next deadline lies so far from the last event, and nothing at all happens before it."""
    due = job.machine.next_deadline()
    assert due is not None
    assert due - job.now_s == pytest.approx(seconds, abs=0.1)
    before = (job.where, len(job.effects))
    assert job.machine.tick(due - 0.01) == []
    assert (job.where, len(job.effects)) == before
    assert job.machine.next_deadline() == due
    job.deadline()


def test_start_up_has_a_deadline() -> None:
    job = with_deadlines(world_size=3)
    job.join()
    job.withhold(job.workers[1], WorkerReady)
    job.settle()
    assert_due_in(job, DEADLINES["start_s"])
    what = "rank 1 did not reach the first step within 50 s of the first keepstep.init()"
    assert ended(job) == (1, f"{what}. What takes so long has to be prepared before the job")


def test_a_start_up_of_a_job_that_has_trained_is_tried_again_after_its_deadline() -> None:
    """Who is late may only wait for another: all are stopped, and who cannot stop is the one."""
    job = with_deadlines(num_spares=2, checkpoint_every=3).bring_all(7, Phase.BACKWARD)
    for rank in range(2):
        job.kill(job.holder(rank))
    while job.machine.stage is not Stage.STARTING:
        next(job.moves(training=False))[1]()
    hung = next(worker.worker for worker in job.machine.roster.holders() if worker.rank == 1)
    while hung not in job.workers:
        next(job.moves(training=False))[1]()
    started_s = job.now_s
    job.hang(job.workers[hung], seen=False)
    job.settle()
    assert job.where == (Stage.STARTING, 2)
    job.deadline()
    assert job.now_s - started_s == pytest.approx(DEADLINES["start_s"], abs=0.1)
    assert job.where == (Stage.STOPPING, 3)
    assert "did not reach their first step in time" in job.machine.records[-1].detail
    until_training(job)
    assert job.where == (Stage.TRAINING, 3)
    fenced = [order.worker for order in job.orders(FenceWorker)]
    assert fenced.index(hung) < len(fenced) - 1, "what the others have exchanged is not whole: all restart"
    assert job.machine.records[-1].resume_step == 6


def one_killed_and_one_hung(num_spares: int) -> tuple[SimulatedJob, SimulatedWorker]:
    """Rank 1 of three is killed, and rank 2, which is returned, hangs unseen: it alone has not stopped."""
    job = with_deadlines(world_size=3, num_spares=num_spares).bring_all(3, Phase.BACKWARD)
    hung = job.holder(2)
    job.hang(hung, seen=False)
    job.kill(job.holder(1))
    return job.settle(), hung


def test_a_survivor_that_reaches_no_safe_point_in_time_is_lost_too() -> None:
    job, silent = one_killed_and_one_hung(num_spares=2)
    assert_due_in(job, DEADLINES["stop_s"])
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert [order.worker for order in job.orders(FenceWorker)] == [silent.number]
    assert [failure.rank for failure in job.machine.records[-1].failures] == [1, 2]
    assert job.machine.records[-1].failures[1].detail == "it did not reach a safe point in time"


def test_a_replacement_that_never_comes_ends_in_a_rescue() -> None:
    job = waiting_for_help()
    assert_due_in(job, DEADLINES["start_s"])
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert "no replacement reached its first step in time" in reason
    assert "rescued-0-at-3.pt" in reason


def waiting_for_help() -> SimulatedJob:
    """Rank 1 is lost, and the fresh process that is to take it does not come up."""
    job = with_deadlines(num_spares=0).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    return replaced(job, 2)


def replaced(job: SimulatedJob, number: int) -> SimulatedJob:
    """Another fresh process is started, and does not come up either."""
    while number not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[number], WorkerReady)
    return job.settle()


def test_what_is_lost_while_help_is_waited_for_does_not_put_the_end_off() -> None:
    """Else one fresh process after the other could be lost, and the survivors would wait for ever."""
    job = waiting_for_help()
    due = job.machine.next_deadline()
    for number in (2, 3):
        job.now_s += 0.4 * DEADLINES["start_s"]
        job.kill(job.workers[number])
        replaced(job, number + 1)
        assert job.where == (Stage.STOPPING, 2)
        assert job.machine.next_deadline() == due
    job.deadline()
    job.settle()
    assert ended(job)[0] == 76


def test_help_is_waited_for_again_in_another_recovery() -> None:
    job = waiting_for_help()
    first_due = job.machine.next_deadline()
    job.now_s += 0.9 * DEADLINES["start_s"]
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    job.bring_all(5, Phase.BACKWARD)
    job.kill(job.holder(0))
    replaced(job, job.machine.roster.num_started)
    due = job.machine.next_deadline()
    assert first_due is not None
    assert due is not None
    assert due - job.now_s == pytest.approx(DEADLINES["start_s"], abs=0.1)
    assert due > first_due


def until_training(job: SimulatedJob) -> None:
    """Lets deadlines come until training continues or the job has ended."""
    for _ in range(5):
        if job.settle().machine.stage in (Stage.TRAINING, Stage.ENDED):
            return
        job.deadline()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_while_state_is_moved_is_lost(rank: int) -> None:
    """As a source, or as the one that receives."""
    job = with_deadlines(world_size=3, num_spares=3).bring_all(3, Phase.BACKWARD)
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is Stage.RECOVERING
    hung = job.holder(rank)
    job.hang(hung, seen=False)
    job.release()
    job.settle()
    assert_due_in(job, DEADLINES["recover_s"])
    until_training(job)
    assert job.where == (Stage.TRAINING, 3)
    fenced = {order.worker for order in job.orders(FenceWorker)}
    assert hung.number in fenced
    assert 2 not in fenced, "rank 2 had recovered, and waited for the controller only"


def test_ranks_that_wait_for_a_hung_one_in_the_rendezvous_are_its_victims() -> None:
    """A spare that hangs unseen is found out only when the others wait for it."""
    job = with_deadlines(world_size=3, num_spares=2).bring_all(3, Phase.BACKWARD)
    hung = job.workers[3]
    job.hang(hung, seen=False)
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is Stage.RECOVERING
    until_training(job)
    assert [order.worker for order in job.orders(FenceWorker)] == [hung.number]
    assert job.machine.stage is Stage.TRAINING


def test_a_rescue_has_a_deadline() -> None:
    job = with_deadlines(world_size=3, num_spares=0, max_restarts=0).bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(1), StateRescued)
    job.kill(job.holder(2))
    job.settle()
    assert job.machine.stage is Stage.RESCUING
    assert_due_in(job, DEADLINES["end_s"])
    assert ended(job)[0] == 76


def test_a_script_that_ends_alone_has_a_deadline() -> None:
    job = with_deadlines().bring_all(3, Phase.UPDATED)
    job.quit(job.holder(0))
    job.settle()
    assert_due_in(job, DEADLINES["end_s"])
    assert ended(job) == (1, "ranks [0] ended their script while the others still train")


def test_the_end_after_a_loss_has_a_deadline() -> None:
    job = with_deadlines(num_steps=2).bring_all(1, Phase.UPDATED)
    for worker in job.workers.values():
        job.withhold(worker, WorkerDone)
    while job.machine.stage is Stage.TRAINING:
        next(job.moves(training=True))[1]()
    job.settle()
    job.kill(job.holder(1))
    job.settle()
    assert_due_in(job, DEADLINES["end_s"])
    assert ended(job) == (1, "rank 1 failed in the code after the last step: killed by SIGKILL")


@pytest.mark.parametrize("survivor_answers", [True, False])
def test_a_process_that_cannot_be_killed_loses_its_device_and_no_more(survivor_answers: bool) -> None:
    """One that waits inside a driver does not die of SIGKILL."""
    job = with_deadlines(world_size=3, num_spares=3).bring_all(3, Phase.BACKWARD)
    for worker in job.workers.values():
        job.withhold(worker, WorkerFenced)
    job.hang(job.holder(1))
    if not survivor_answers:
        job.hang(job.holder(2), seen=False)
    job.settle()
    until_training(job)
    assert job.machine.stage is Stage.TRAINING
    closed = {(node.name, device) for node in job.machine.roster.nodes.values() for device in node.closed}
    lost = [worker for worker in job.machine.roster.workers.values() if worker.lost]
    assert closed == {(worker.node, worker.device) for worker in lost}
    assert len(closed) == (1 if survivor_answers else 2)
    job.finish()
    assert ended(job)[0] == 0


def test_a_fence_that_is_ordered_late_has_a_time_of_its_own() -> None:
    """A rank is found hung just before those that are stopped must all have answered."""
    job, hung = one_killed_and_one_hung(num_spares=3)
    due_s = job.machine.next_deadline()
    assert due_s is not None
    job.now_s = due_s - 0.1
    job.withhold(hung, WorkerFenced)
    job.say(WorkerLost(hung.number, Cause.HANG, "no progress", False, None, job.now_s))
    assert job.machine.next_deadline() == pytest.approx(job.now_s + DEADLINES["end_s"])
    job.release()
    job.finish_well()


def test_training_waits_for_nothing() -> None:
    job = with_deadlines().bring_all(3, Phase.BACKWARD)
    assert job.machine.next_deadline() is None
    assert job.machine.tick(1e9) == []


def one_silent_and_one_lost_late() -> tuple[SimulatedJob, SimulatedWorker, SimulatedWorker, float]:
    """Rank 3 has not stopped, and rank 2 is lost just before its deadline, which is returned. Nothing is fenced yet."""
    job = with_deadlines(world_size=4, num_spares=4).bring_all(3, Phase.BACKWARD)
    silent, lost = job.holder(3), job.holder(2)
    job.withhold(silent, SafePointReached)
    job.kill(job.holder(1))
    job.settle()
    due_s = job.machine.next_deadline()
    assert due_s is not None
    job.now_s = due_s - 0.1
    job.withhold(lost, WorkerFenced)
    job.say(WorkerLost(lost.number, Cause.HANG, "no progress", False, None, job.now_s))
    return job, silent, lost, due_s


def test_a_late_loss_does_not_put_the_end_off_for_a_survivor_that_does_not_stop() -> None:
    """Else one node after the other could be lost, and all would wait for ever for a rank that hangs."""
    job, silent, _, due_s = one_silent_and_one_lost_late()
    assert job.machine.next_deadline() == due_s
    job.deadline()
    assert silent.number in {order.worker for order in job.orders(FenceWorker)}
    assert job.machine.next_deadline() == pytest.approx(due_s + DEADLINES["end_s"])
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


def test_a_late_fence_has_its_time_even_if_the_last_survivor_stops_meanwhile() -> None:
    job, _, lost, due_s = one_silent_and_one_lost_late()
    lost_s = job.now_s
    job.release()
    job.withhold(lost, WorkerFenced)
    job.settle()
    job.deadline()
    assert job.now_s == due_s
    assert job.where == (Stage.STOPPING, 2)
    assert job.machine.next_deadline() == pytest.approx(lost_s + DEADLINES["end_s"])
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


def test_a_rescue_has_a_new_time_whenever_state_was_written() -> None:
    job = waiting_for_help()
    survivor = job.holder(0)
    job.withhold(survivor, StateRescued)
    job.deadline()
    job.settle()
    for _ in range(3):
        job.now_s += 0.9 * DEADLINES["end_s"]
        job.say(StateMoves(survivor.number))
        assert job.machine.next_deadline() == pytest.approx(job.now_s + DEADLINES["end_s"])
    job.release()
    job.settle()
    assert "rescued-0-at-3.pt" in ended(job)[1]


def test_a_recovery_has_a_new_time_whenever_state_was_moved() -> None:
    job = with_deadlines(world_size=3).bring_all(3, Phase.BACKWARD)
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is Stage.RECOVERING
    for _ in range(3):
        job.now_s += 0.9 * DEADLINES["recover_s"]
        job.say(StateMoves(job.holder(0).number))
        assert job.machine.next_deadline() == pytest.approx(job.now_s + DEADLINES["recover_s"])
    assert job.where == (Stage.RECOVERING, 2)
    job.release()
    job.finish_well()
