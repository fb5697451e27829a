"""The stages of a job alone: what each answers to an event, without the machine that goes on to the next."""

import typing
from collections.abc import Callable

import pytest
from tests.protocol.simulated_job import NODE

from keepstep.protocol.messages import Cause, EndJob, NodeJoined, WorkerReady
from keepstep.protocol.recovery import EXIT_FAILED, RecoverySettings, Stage
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.records import Failure
from keepstep.protocol.recovery.stages.last import Draining, Finished, JobEnded, Rescuing
from keepstep.protocol.recovery.stages.recovering import Recovering
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.stages.starting import Starting, WaitingForNodes
from keepstep.protocol.recovery.stages.stopping import Stopping
from keepstep.protocol.recovery.stages.training import Training
from keepstep.protocol.recovery.transitions import (
    ToEnded,
    ToRecovering,
    ToStarting,
    ToStopping,
    ToTraining,
    Transition,
)

SETTINGS = RecoverySettings(world_size=2, num_spares=1)
NOW_S = 100.0
CLASSES = (WaitingForNodes, Starting, Training, Stopping, Recovering, Finished, Rescuing, Draining, JobEnded)
FAILURE = Failure(1, Cause.SIGNAL, "killed by SIGKILL", 3, "backward", NOW_S)


def offered(slots: int) -> JobState:
    """A job to which one node has offered itself."""
    job = JobState(SETTINGS)
    job.roster.add_node(NodeJoined(NODE, slots, "", 0, 0, (), 0))
    return job


def started() -> tuple[JobState, Starting]:
    """A job whose ranks have been started."""
    job = offered(3)
    return job, Starting(job, "the job starts", NOW_S)


def ready() -> tuple[JobState, Starting]:
    """A job whose ranks stand at their first step."""
    job, stage = started()
    for worker in list(job.roster.holders()):
        stage.worker_joined(worker, NOW_S)
        worker.ready = WorkerReady(worker.worker, 1, (0,), (), False, False, "0", 0.0)
        assert stage.worker_ready(worker, NOW_S) is None
    return job, stage


def recovering() -> tuple[JobState, Recovering]:
    """A job whose ranks have been told to go to step 0."""
    job, stage = ready()
    stage.proceed(NOW_S)
    return job, Recovering(job, 0, NOW_S)


def test_there_is_a_transition_to_every_stage_and_a_class_for_it() -> None:
    assert {to.stage for to in typing.get_args(Transition)} == set(Stage) == {kind.stage for kind in CLASSES}


@pytest.mark.parametrize(("slots", "follows"), [(2, None), (3, ToStarting("the job starts"))])
def test_the_job_starts_at_once_where_the_spares_fit_too(slots: int, follows: ToStarting | None) -> None:
    assert WaitingForNodes(offered(slots)).node_joined(NODE, NOW_S) == follows


def test_the_job_starts_without_spares_when_no_node_has_brought_room_for_them() -> None:
    stage = WaitingForNodes(offered(2))
    stage.node_joined(NODE, NOW_S)
    assert stage.deadline_s == NOW_S + SETTINGS.spares_grace_s
    assert stage.overdue(stage.deadline_s) == ToStarting("the job starts")


def test_a_job_without_room_for_its_ranks_ends() -> None:
    stage = WaitingForNodes(offered(1))
    follows = stage.overdue(NOW_S)
    assert isinstance(follows, ToEnded)
    assert follows.order.exit_code == EXIT_FAILED


def test_the_ranks_go_to_the_step_that_they_reach_when_all_are_ready() -> None:
    _, stage = started()
    assert stage.awaited == {0, 1}
    assert stage.proceed(NOW_S) is None
    _, stage = ready()
    assert stage.proceed(NOW_S) == ToRecovering(0)


def test_training_begins_when_all_stand_at_the_resume_step() -> None:
    _, stage = recovering()
    assert stage.proceed(NOW_S) is None
    stage.awaited.clear()
    assert stage.proceed(NOW_S) == ToTraining()


@pytest.mark.parametrize("make", [started, recovering], ids=["starting", "recovering"])
def test_a_lost_rank_stops_the_others(make: Callable[[], tuple[JobState, JobStage]]) -> None:
    _, stage = make()
    what = "rank 1 lost: killed by SIGKILL"
    assert stage.ranks_lost([FAILURE], NOW_S) == ToStopping(Cause.SIGNAL, what, (FAILURE,))


def test_a_further_loss_belongs_to_the_recovery_that_has_begun() -> None:
    job, _ = recovering()
    stopping = Stopping(job, ToStopping(Cause.COLLECTIVE, "connection reset", ()), NOW_S)
    assert stopping.ranks_lost([FAILURE], NOW_S) is None
    assert job.records == [job.record]
    assert job.record.failures == [FAILURE]


def test_survivors_that_do_not_stop_in_time_are_suspected() -> None:
    job, _ = recovering()
    stopping = Stopping(job, ToStopping(Cause.COLLECTIVE, "connection reset", ()), NOW_S)
    assert stopping.overdue(NOW_S) is None
    assert [(each.report.worker, each.due_s) for each in job.suspicions] == [(0, NOW_S), (1, NOW_S)]
    assert not any(worker.lost for worker in job.roster.holders())


@pytest.mark.parametrize("kind", [Finished, Rescuing, Draining, JobEnded], ids=lambda kind: kind.__name__)
def test_nothing_is_recovered_from_in_the_last_stages(kind: type[JobStage]) -> None:
    job, _ = recovering()
    arguments = {Finished: (), Rescuing: ("why", NOW_S), Draining: ("how",)}
    stage = kind(job, *arguments[kind]) if kind in arguments else JobEnded(job, EndJob(0, "over"))
    assert stage.ranks_lost([FAILURE], NOW_S) is None
    assert stage.interrupted(Cause.COLLECTIVE, "connection reset", (), NOW_S) is None


def test_the_first_script_that_joins_a_drained_job_starts_no_spares() -> None:
    job, _ = started()
    draining = Draining(job, "training had not begun")
    job.orders.take()
    draining.worker_joined(next(iter(job.roster.holders())), NOW_S)
    assert job.progress.is_initialised
    assert job.orders.take() == []
