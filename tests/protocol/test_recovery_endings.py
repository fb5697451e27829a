"""The controller's machine: how a job ends, well or not, and what each exit code means."""

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.protocol.messages import (
    Abandon,
    Cause,
    CollectiveFailed,
    Complete,
    EndJob,
    FenceWorker,
    Recover,
    Rescue,
    SafePointReached,
    StartWorker,
    StateRecovered,
    StateRescued,
    StepObserved,
    StepsFinished,
    Tag,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import EXIT_FAILED, EXIT_NOTHING_TO_RECOVER, EXIT_TOO_FEW_RANKS, Stage
from keepstep.protocol.resume import Action


def ended(job: SimulatedJob) -> tuple[int, str]:
    assert job.ended is not None, f"the job is still {job.machine.stage}"
    assert job.machine.next_deadline() is None
    return job.ended.exit_code, job.ended.reason


def kill_all(job: SimulatedJob) -> None:
    """All ranks at once; spares live on."""
    for rank in range(job.machine.settings.world_size):
        job.kill(job.holder(rank))
    job.settle()


def test_the_exit_codes_are_distinguished() -> None:
    assert (EXIT_FAILED, EXIT_NOTHING_TO_RECOVER, EXIT_TOO_FEW_RANKS) == (1, 75, 76)


# ---- The good end ---------------------------------------------------------------------------------------------------


def test_all_finish_then_complete_then_done_then_exit_0() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, num_steps=3).bring_all(2, Phase.UPDATED)
    job.withhold(job.holder(1), StepsFinished)
    while job.holder(0).state.name == "TRAINING":
        list(job.moves(training=True))[-1][1]()
    job.settle()
    assert job.where == (Stage.TRAINING, 1)
    assert job.orders(Complete) == []
    job.release()
    job.withhold(job.holder(0), WorkerDone)
    job.withhold(job.holder(1), WorkerDone)
    while job.machine.stage is Stage.TRAINING:
        next(job.moves(training=True))[1]()
    job.settle()
    assert job.orders(Complete) == [Complete(1)]
    assert job.handed_to(Complete) == [(0, 1)]
    assert [order.worker for order in job.orders(FenceWorker)] == [2]
    assert job.machine.next_deadline() is None, "the code after the loop may take as long as it likes"
    job.release()
    job.settle()
    assert ended(job) == (0, "all ranks have finished")
    assert job.machine.digests == {0: "weights at step 3", 1: "weights at step 3"}


def test_a_loss_before_all_have_finished_is_recovered_and_those_who_had_finish_again() -> None:
    job = SimulatedJob(world_size=2, num_steps=3).bring_all(2, Phase.UPDATED)
    job.withhold(job.holder(1), StepsFinished)
    while job.holder(0).state.name == "TRAINING":
        list(job.moves(training=True))[-1][1]()
    job.settle()
    job.kill(job.holder(1))
    job.settle()
    job.release()
    assert job.machine.generation == 2
    job.finish_well()


def test_scripts_that_leave_the_loop_early_end_well_when_all_do() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.UPDATED)
    job.quit(job.holder(0))
    job.settle()
    assert job.where == (Stage.TRAINING, 1)
    job.quit(job.holder(1))
    job.settle()
    why = "steps() was not iterated to its end: the script ended on rank 0 after 4 steps, rank 1 after 4 steps"
    assert ended(job) == (0, why)


def test_nothing_is_started_after_the_last_step() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, num_steps=3).bring_all(2, Phase.BACKWARD)
    job.kill(job.holder(1))
    job.settle()
    for worker in job.workers.values():
        job.withhold(worker, WorkerDone)
    job.withhold(NODE, StepObserved)
    while job.machine.stage is Stage.TRAINING:
        next(job.moves(training=True))[1]()
    num_started = len(job.orders(StartWorker))
    job._withheld.discard((NODE, StepObserved))
    job.settle()
    assert not any(job.reports["page", NODE])
    assert len(job.orders(StartWorker)) == num_started


# ---- A failure after the last step ----------------------------------------------------------------------------------


def completed(world_size: int = 2) -> SimulatedJob:
    """All ranks are in the code after the loop."""
    job = SimulatedJob(world_size=world_size, num_spares=1, num_steps=2).bring_all(1, Phase.UPDATED)
    for worker in job.workers.values():
        job.withhold(worker, WorkerDone)
    while job.machine.stage is Stage.TRAINING:
        next(job.moves(training=True))[1]()
    return job.settle()


@pytest.mark.parametrize("fault", ["kill", "hang", "throw"])
def test_a_loss_after_the_last_step_abandons_the_others_and_fails(fault: str) -> None:
    job = completed()
    getattr(job, fault)(job.holder(1))
    job.settle()
    assert job.handed_to(Abandon) == [(0, 1) if fault == "hang" else (0,)]
    assert job.where == (Stage.FINISHED, 1)
    job.release()
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 1
    assert "failed in the code after the last step" in reason


def test_the_first_loss_after_the_last_step_is_named_as_the_cause() -> None:
    job = completed()
    job.throw(job.holder(1), "OSError: disk full")
    job.settle()
    job.release()
    job.settle()
    assert "rank 1 failed in the code after the last step: exit code 1: OSError: disk full" in ended(job)[1]


def test_a_rank_that_is_through_already_is_not_abandoned() -> None:
    job = completed()
    job._withheld.discard((0, WorkerDone))
    job.settle()
    assert job.where == (Stage.FINISHED, 1)
    job.kill(job.holder(1))
    job.settle()
    assert job.handed_to(Abandon) == []
    assert ended(job)[0] == 1


# ---- No rank left ----------------------------------------------------------------------------------------------------


def test_no_rank_left_without_a_checkpoint_ends_with_75_and_the_cause() -> None:
    job = SimulatedJob(world_size=2, num_spares=2).bring_all(3, Phase.BACKWARD)
    kill_all(job)
    exit_code, reason = ended(job)
    assert exit_code == 75
    assert "no live rank holds the state any more and there is no checkpoint" in reason
    assert reason.endswith(": ranks 0 and 1: killed by SIGKILL")
    assert "generation 2" in reason


def test_what_has_become_of_each_copy_is_said_at_the_end() -> None:
    job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, Phase.UPDATED)
    job.withhold(job.holder(2), SafePointReached)
    hung, harmed = job.holder(1), job.holder(2)
    job.kill(job.holder(0))
    job.settle()
    lost = WorkerLost(hung.number, Cause.HANG, "no progress in optimizer of step 30", False, None, job.now_s)
    job.say(lost)
    flaw = "its copy was given up: the value that a failure cut off may have got into an update, at train.py:19"
    job.say(SafePointReached((harmed.number,), 2, 3, Phase.UPDATED, (), None, (), False, (), None, flaw))
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 75
    assert reason.endswith(
        f": rank 0: killed by SIGKILL; rank 1: fenced, no progress in optimizer of step 30; rank 2: {flaw}"
    )


def test_a_copy_that_was_on_its_way_is_named_with_the_loss_before() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.UPDATED)
    first = job.holder(0)
    job.kill(job.holder(1))
    job.withhold(job.workers[2], StateRecovered)
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    job.kill(first)
    job.release()
    job.withhold(job.workers[2], StateRecovered)
    replacement = job.holder(1)
    replacement.stand()
    job.withhold(replacement, SafePointReached)
    job.settle()
    flaw = "it had not yet received the whole state"
    job.say(SafePointReached((replacement.number,), 3, -1, Phase.STARTING, (), None, (), False, (), None, flaw))
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 75
    assert reason.endswith(
        ": rank 0: killed by SIGKILL; rank 1: killed by SIGKILL, and no replacement has received the state yet"
    )


def test_a_lost_shard_is_named_and_not_the_others() -> None:
    job = SimulatedJob(world_size=4, num_spares=1, shards=lambda rank: str(rank // 2)).bring_all(3, Phase.UPDATED)
    for rank in (2, 3):
        job.kill(job.holder(rank))
    job.settle()
    exit_code, reason = ended(job)
    assert (
        exit_code,
        reason.endswith("(protect(checkpoint_dir=...) writes them): ranks 2 and 3: killed by SIGKILL"),
    ) == (
        75,
        True,
    )


def test_no_rank_left_before_anything_was_trained_restarts_all() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).settle()
    kill_all(job)
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].resume_step == 0
    job.finish_well()


@pytest.mark.parametrize("num_spares", [0, 2])
def test_no_rank_left_with_a_checkpoint_restarts_all_from_the_newest(num_spares: int) -> None:
    job = SimulatedJob(world_size=2, num_spares=num_spares, checkpoint_every=3).bring_all(7, Phase.BACKWARD)
    assert job.checkpoints == {3, 6}
    kill_all(job)
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].actions == {0: "rewind", 1: "rewind"}
    assert job.machine.records[-1].origins() == {0: "checkpoint", 1: "checkpoint"}
    assert job.machine.records[-1].resume_step == 6
    assert job.machine.progress.trained_to == 7, "the tag of a lost rank says how far it was"
    job.finish_well()


def test_a_checkpoint_older_than_an_earlier_recovery_can_be_gone_back_to() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, checkpoint_every=4).bring_all(6, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.settle()
    assert job.machine.records[-1].resume_step == 6
    kill_all(job)
    assert job.machine.records[-1].resume_step == 4
    job.finish_well()


def test_a_rank_lost_while_all_go_back_to_a_checkpoint_is_recovered_from() -> None:
    """The other has loaded it already and stays there: in the second recovery, no process rewinds."""
    job = SimulatedJob(world_size=2, num_spares=1, checkpoint_every=4).bring_all(6, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.settle().bring_all(7, Phase.UPDATED)
    for rank in range(2):
        job.kill(job.holder(rank))
    job.checkpoints.remove(8)
    while len(job.machine.records) < 2 or job.machine.stage is not Stage.STARTING:
        next(job.moves(training=False))[1]()
    job.withhold(job.holder(1), StateRecovered)
    job.settle()
    assert job.where == (Stage.RECOVERING, 3)
    job.kill(job.holder(1))
    assert job.settle().where == (Stage.TRAINING, 4)
    assert [record.resume_step for record in job.machine.records] == [6, 4, 4]
    assert job.machine.records[-1].actions[0] == Action.STAY
    job.finish_well()


def test_fresh_ranks_that_find_no_checkpoint_do_not_silently_start_over() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=10).bring_all(7, Phase.BACKWARD)
    kill_all(job)
    exit_code, reason = ended(job)
    assert exit_code == 75
    assert "find no checkpoint" in reason


@pytest.mark.parametrize("checkpoint_every", [None, 10])
def test_fresh_ranks_of_a_script_that_looks_for_its_own_checkpoint_begin_where_it_says(
    checkpoint_every: int | None,
) -> None:
    """Here it has found none, so that this is step 0."""
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=checkpoint_every, resumes=True)
    kill_all(job.bring_all(7, Phase.BACKWARD))
    job.finish_well()


def test_fresh_ranks_do_not_silently_start_over_when_one_of_them_is_lost_either() -> None:
    """One has come to step 0 and would stay there, and its peer is lost before all are ready."""
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=10).bring_all(7, Phase.BACKWARD)
    for rank in range(2):
        job.kill(job.holder(rank))
    while 3 not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[3], WorkerReady)
    job.settle()
    assert job.where == (Stage.STARTING, 2)
    job.kill(job.workers[3])
    job.release()
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 75
    assert "find no checkpoint" in reason


def test_a_checkpoint_of_one_shard_alone_is_none() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=10, shards=str).bring_all(7, Phase.BACKWARD)
    for rank in range(2):
        job.kill(job.holder(rank))
    while 3 not in job.workers:
        next(job.moves(training=False))[1]()
    job.checkpoints.add(5)
    job.withhold(job.workers[3], WorkerReady)
    job.settle()
    job.checkpoints.clear()
    job.release()
    job.settle()
    assert ended(job)[0] == 75


def test_survivors_whose_copies_are_torn_go_back_to_a_checkpoint() -> None:
    """An echo in mid-update tore the only survivor; it can still read a checkpoint, and sends it on."""
    job = SimulatedJob(world_size=2, num_spares=1, checkpoint_every=4).bring_all(6, Phase.BACKWARD)
    job.holder(0).partially_updated = True
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].resume_step == 4
    assert job.machine.records[-1].actions[0] == Action.REWIND
    job.finish_well()


# ---- The script's own failure ---------------------------------------------------------------------------------------


def test_an_exception_on_all_ranks_is_the_scripts_own_and_ends_with_1() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    for rank in range(2):
        job.throw(job.holder(rank), "ValueError: bad batch")
    job.settle()
    assert ended(job) == (1, "ranks 0 and 1 lost: exit code 1: ValueError: bad batch")


def test_an_exception_on_all_ranks_but_one_killed_is_not_the_scripts_own() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.throw(job.holder(0))
    job.kill(job.holder(1))
    job.settle()
    assert ended(job)[0] == 75


@pytest.mark.parametrize("last", ["kill", "hang", None])
def test_an_exception_on_all_ranks_but_one_is_not_the_scripts_own_whatever_becomes_of_that_one(
    last: str | None,
) -> None:
    job = SimulatedJob(world_size=3, num_spares=3, checkpoint_every=3).bring_all(4, Phase.BACKWARD)
    for rank in (0, 1):
        job.throw(job.holder(rank))
    if last is not None:
        getattr(job, last)(job.holder(2))
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].num_exceptions == 2
    assert job.machine.records[-1].resume_step == (4 if last is None else 3)
    job.finish_well()


def test_an_exception_on_one_rank_is_recovered_from() -> None:
    job = SimulatedJob(world_size=2).bring_all(3, Phase.BACKWARD)
    job.throw(job.holder(0))
    job.settle()
    assert job.machine.records[-1].cause == "exception"
    job.finish_well()


def test_an_exception_on_one_rank_of_a_job_without_replicas_is_gone_back_from() -> None:
    """The other ranks are stopped with it, for their shards are of no use alone: that is no exception of theirs."""
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=3, shards=str).bring_all(4, Phase.BACKWARD)
    job.throw(job.holder(0))
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].num_exceptions == 1
    assert job.machine.records[-1].resume_step == 3
    job.finish_well()


@pytest.mark.parametrize("rank", [0, None])
def test_a_fatal_error_ends_the_job_wherever_it_is(rank: int | None) -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    worker = job.workers[2] if rank is None else job.holder(rank)
    job.throw(worker, "StateMismatch: other shapes", fatal=True)
    job.settle()
    who = "a spare" if rank is None else "rank 0"
    assert ended(job) == (1, f"{who} failed: StateMismatch: other shapes")


def test_an_exception_before_the_first_step_ends_the_job_at_once() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job.join()
    job.throw(job.workers[1], "ImportError: no module named gpt")
    job.settle()
    assert ended(job) == (1, "rank 1 failed: ImportError: no module named gpt")


def test_a_rank_that_exits_before_the_first_step_ends_the_job() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job.join()
    job.throw(job.workers[1])
    job.reports[1] = type(job.reports[1])(report for report in job.reports[1] if not isinstance(report, WorkerFailed))
    job.settle()
    assert ended(job) == (1, "rank 1 ended before its first step: exit code 1")


def failing_in_start_up(*, with_word: bool) -> SimulatedJob:
    """Rank 1 fails while the others are already at their first step, and a peer notices before the agent does."""
    job = SimulatedJob(world_size=3, num_spares=1)
    job.join()
    job.withhold(job.workers[1], WorkerReady)
    job.settle()
    job.throw(job.workers[1], "ImportError: no module named gpt")
    if not with_word:
        job.reports[1].popleft()
    job.say(CollectiveFailed(0, 1, "world", "connection closed by peer"))
    assert job.where == (Stage.STOPPING, 2)
    return job


@pytest.mark.parametrize("with_word", [True, False])
def test_a_start_up_that_fails_ends_the_job_though_a_peer_told_of_it_first(with_word: bool) -> None:
    job = failing_in_start_up(with_word=with_word).settle()
    why = "failed: ImportError: no module named gpt" if with_word else "ended before its first step: exit code 1"
    assert ended(job) == (1, f"rank 1 {why}")
    assert len(job.orders(StartWorker)) == 4, "nothing is restarted"


def test_a_rank_that_fails_while_the_first_groups_are_connected_ends_the_job() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job.join()
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.settle()
    assert job.machine.stage is Stage.RECOVERING
    job.throw(job.holder(1))
    job.settle()
    assert ended(job) == (1, "rank 1 failed: ValueError: bad batch")


def test_after_training_an_exception_in_the_first_recovery_is_recovered_from() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).settle()
    job.withhold(job.holder(0), SafePointReached)
    job.say(CollectiveFailed(0, 1, "world", "connection closed by peer"))
    job.throw(job.holder(1))
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def restarting(*, held: type = WorkerReady) -> SimulatedJob:
    """All ranks were lost after training, and rank 1 of those that take their place is held back."""
    job = SimulatedJob(world_size=2, num_spares=1, checkpoint_every=3).bring_all(7, Phase.BACKWARD)
    for rank in range(2):
        job.kill(job.holder(rank))
    while job.machine.stage is not Stage.STARTING:
        next(job.moves(training=False))[1]()
    (number,) = (worker.worker for worker in job.machine.roster.holders() if worker.rank == 1)
    while number not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[number], held)
    return job.settle()


@pytest.mark.parametrize("with_word", [True, False])
@pytest.mark.parametrize(("held", "stage"), [(WorkerReady, Stage.STARTING), (StateRecovered, Stage.RECOVERING)])
def test_a_job_that_has_trained_is_not_ended_by_a_start_up_that_fails(
    held: type, stage: Stage, with_word: bool
) -> None:
    """Its script has worked before. Where it fails again and again, the count of failures in a row ends it."""
    job = restarting(held=held)
    assert job.where == (stage, 2)
    failing = job.holder(1)
    job.throw(failing, "OSError: no route to host")
    if not with_word:
        job.reports[failing.number].popleft()
    job.release()
    assert job.settle().where == (Stage.TRAINING, 3)
    record = job.machine.records[-1]
    assert (record.cause, record.resume_step) == ("exception" if with_word else "exit", 6)
    job.finish_well()


def test_a_job_that_has_trained_is_ended_by_start_ups_that_keep_failing() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, checkpoint_every=3, max_recoveries_without_progress=3)
    kill_all(job.bring_all(7, Phase.BACKWARD))
    for _ in range(8):
        if not job.ended:
            job.throw(job.holder(1), "OSError: no route to host")
            job.settle()
    assert ended(job)[0] == 76
    assert "failures in a row without a completed step: rank 1 lost: exit code 1: OSError" in ended(job)[1]


# ---- How far training had come --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED])
def test_a_step_that_no_rank_has_reported_is_known_by_the_tags_of_the_lost(phase: Phase) -> None:
    """All ranks are lost before any agent has seen a step end: it must not be begun again in silence."""
    job = SimulatedJob(world_size=2, num_spares=2)
    job.withhold(NODE, StepObserved)
    job.bring_all(3, phase)
    assert job.machine.progress.trained_to == 0
    kill_all(job)
    assert job.machine.progress.trained_to == (4 if phase in (Phase.OPTIMIZER, Phase.UPDATED) else 3)
    assert ended(job)[0] == 75


def test_a_lost_rank_that_trained_on_until_it_was_killed_is_known_by_its_last_tag() -> None:
    """It was taken for hung in step 0, and before its fence came it had begun step 1."""
    job = SimulatedJob(world_size=1, num_spares=0).bring_all(0, Phase.BACKWARD)
    rank = job.holder(0)
    job.say(WorkerLost(rank.number, Cause.HANG, "no progress", False, Tag(1, 0, Phase.BACKWARD), job.now_s))
    assert job.machine.progress.trained_to == 0
    rank.step, rank.phase = 1, Phase.FORWARD
    job.kill(rank)
    job.settle()
    assert job.machine.progress.trained_to == 1
    assert ended(job)[0] == 75


def test_a_step_that_no_rank_has_reported_is_known_by_the_safe_points() -> None:
    job = SimulatedJob(world_size=2, num_spares=2)
    job.withhold(NODE, StepObserved)
    job.bring_all(3, Phase.SYNCED)
    job.say(CollectiveFailed(0, 1, "world", "connection closed by peer"))
    while job.machine.stage is not Stage.RECOVERING:
        next(job.moves(training=False))[1]()
    assert job.machine.progress.trained_to == 3, "the fourth step is not complete yet"
    assert job.settle().machine.progress.trained_to == 4


def test_a_script_that_ends_while_a_lost_rank_is_missing_is_no_success() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.BACKWARD)
    job.withhold(job.holder(0), SafePointReached)
    job.kill(job.holder(1))
    job.settle()
    job.quit(job.holder(0))
    job.settle()
    assert ended(job)[0] != 0


# ---- It cannot go on ------------------------------------------------------------------------------------------------


def out_of_restarts(world_size: int = 3) -> SimulatedJob:
    """The budget is used up by the loss of the highest rank; the others have been told to rescue what they hold."""
    job = SimulatedJob(world_size=world_size, num_spares=0, max_restarts=0).bring_all(3, Phase.BACKWARD)
    for worker in job.workers.values():
        job.withhold(worker, StateRescued)
    job.kill(job.holder(world_size - 1))
    return job.settle()


def test_restarts_used_up_rescues_what_is_alive_and_ends_with_76() -> None:
    job = out_of_restarts(world_size=2)
    assert job.where == (Stage.RESCUING, 2)
    assert job.handed_to(Rescue) == [(0,)]
    job.release()
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert "--max-restarts is used up: rank 1 lost: killed by SIGKILL" in reason
    assert reason.endswith("state saved: rescued-0-at-3.pt")


def test_every_rescued_state_is_named() -> None:
    job = out_of_restarts(world_size=3)
    job.release()
    job.settle()
    assert ended(job)[1].endswith("state saved: rescued-0-at-3.pt, rescued-1-at-3.pt")


def test_a_state_that_could_not_be_saved_is_not_called_saved() -> None:
    job = out_of_restarts(world_size=2)
    job.holder(0).partially_updated = True
    job.release()
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert "its copy is not whole" in reason
    assert "state saved" not in reason


@pytest.mark.parametrize("fault", ["kill", "throw"])
def test_a_rank_lost_while_rescuing_is_not_waited_for(fault: str) -> None:
    job = out_of_restarts(world_size=3)
    getattr(job, fault)(job.holder(0))
    job.release()
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert reason.endswith("state saved: rescued-1-at-3.pt")


@pytest.mark.parametrize(("max_restarts", "num_recoveries"), [(0, 1), (1, 2), (3, 4)])
def test_each_restart_is_counted_once(max_restarts: int, num_recoveries: int) -> None:
    """One spare to begin with, and as many processes as may be started."""
    job = SimulatedJob(world_size=2, num_spares=1, max_restarts=max_restarts).settle()
    for index in range(num_recoveries):
        job.bring_all(index, Phase.UPDATED)
        job.kill(job.holder(1))
        assert job.settle().where == (Stage.TRAINING, index + 2)
    job.bring_all(num_recoveries, Phase.UPDATED)
    job.kill(job.holder(1))
    job.settle()
    assert ended(job)[0] == 76


def test_too_few_restarts_to_restart_all_ranks_ends_with_76() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, max_restarts=1).settle()
    kill_all(job)
    assert ended(job) == (76, "--max-restarts is used up: ranks 0 and 1 lost: killed by SIGKILL")


def test_state_that_is_refused_is_loaded_once_more_and_then_the_job_ends_with_76() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    replacement = job.workers[2]
    job.withhold(replacement, StateRecovered)
    job.kill(job.holder(1))
    for generation in (2, 3):
        job.settle()
        assert job.where == (Stage.RECOVERING, generation)
        job.refuse(replacement, "ema['n'] is not what was restored")
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert "the state was loaded 2 times and is not what was loaded: rank 1: ema['n'] is not what was" in reason
    assert job.handed_to(Rescue) == [(0, 2)]


def test_state_that_is_refused_once_does_no_harm() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.withhold(job.workers[2], StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    job.refuse(job.workers[2], "ema['n'] is not what was restored")
    job.release()
    assert job.settle().where == (Stage.TRAINING, 3)
    job.finish_well()


def test_a_step_that_fails_again_and_again_ends_with_76() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, max_recoveries_without_progress=3).bring_all(2, Phase.UPDATED)
    for _ in range(3):
        job.bring_all(3, Phase.FORWARD)
        job.throw(job.holder(1))
        job.settle()
        assert job.machine.stage is Stage.TRAINING
    job.bring_all(3, Phase.FORWARD)
    job.throw(job.holder(1))
    job.settle()
    exit_code, reason = ended(job)
    assert exit_code == 76
    assert "4 failures in a row without a completed step: rank 1 lost: exit code 1: ValueError: bad batch" in reason


def test_progress_sets_the_count_of_failures_back() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, max_recoveries_without_progress=1).settle()
    for step in range(5):
        job.bring_all(step, Phase.UPDATED)
        job.throw(job.holder(1))
        assert job.settle().machine.stage is Stage.TRAINING
    job.finish_well()


def test_progress_that_is_reported_after_the_next_failure_counts_too() -> None:
    job = SimulatedJob(world_size=2, num_spares=1, max_recoveries_without_progress=1).settle()
    for step in range(5):
        job.withhold(NODE, StepObserved)
        job.bring_all(step, Phase.UPDATED)
        job.throw(job.holder(1))
        while job.machine.stage is Stage.TRAINING:
            next(job.moves(training=False))[1]()
        job.release()
        assert job.settle().machine.stage is Stage.TRAINING
    job.finish_well()


# ---- Once ------------------------------------------------------------------------------------------------------------


def test_the_job_ends_once() -> None:
    job = SimulatedJob(num_steps=2).finish()
    assert job.orders(EndJob) == [job.ended]
    assert job.machine.ended == job.ended
    assert len(job.orders(Recover)) == 1
    assert job.orders(WorkerLost) == []


def test_a_rescue_for_which_no_rank_is_left_ends_at_once() -> None:
    """It was noticed with the next event only, and that was the deadline, a minute later."""
    job = SimulatedJob(world_size=2, num_spares=0, max_recoveries_without_progress=0).bring_all(3, Phase.BACKWARD)
    begun_s = job.now_s
    for rank in range(2):
        job.kill(job.holder(rank))
    job.settle()
    exit_code, reason = ended(job)
    assert (exit_code, job.now_s - begun_s < 1.0) == (EXIT_TOO_FEW_RANKS, True)
    assert "1 failures in a row without a completed step" in reason
