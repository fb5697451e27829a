"""The controller's machine after its controller was killed: it knows all that it knew, and the rendezvous is lost."""

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import (
    SafePointReached,
    StartWorker,
    StateRecovered,
    StateRescued,
    StepsFinished,
    Stop,
    WorkerDone,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage

OUTAGE_S = 1e5
"""Longer than any deadline."""


def held_in(stage: Stage) -> SimulatedJob:
    """A job that was brought to a stage, and is held there."""
    job = SimulatedJob(world_size=3, num_spares=1, num_steps=4, end_s=20.0)
    if stage is Stage.RESCUING:
        job = SimulatedJob(world_size=3, num_spares=0, max_restarts=0, end_s=20.0)
    if stage is Stage.STARTING:
        job.join().withhold(job.workers[1], WorkerReady)
        return job.settle()
    job.settle()
    if stage in (Stage.FINISHED, Stage.ENDED):
        for worker in job.workers.values() if stage is Stage.FINISHED else ():
            job.withhold(worker, WorkerDone)
        while job.machine.stage is not stage:
            next(job.moves(training=True))[1]()
        return job.settle()
    job.bring_all(2, Phase.BACKWARD)
    held = {Stage.STOPPING: SafePointReached, Stage.RECOVERING: StateRecovered, Stage.RESCUING: StateRescued}
    if stage in held:
        job.withhold(job.holder(0), held[stage])
        job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is stage
    return job


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.STOPPING, Stage.FINISHED, Stage.RESCUING, Stage.ENDED])
def test_a_restart_changes_nothing_while_no_group_is_built(stage: Stage) -> None:
    job = held_in(stage)
    before, num_effects, num_records = job.where, len(job.effects), len(job.machine.records)
    job.restart_controller()
    job.settle()
    assert (job.where, len(job.effects), len(job.machine.records)) == (before, num_effects, num_records)
    job.release()
    if stage in (Stage.TRAINING, Stage.STOPPING):
        job.finish_well()
    elif stage is Stage.RESCUING:
        assert job.settle().ended is not None
        assert job.ended.reason.endswith("state saved: rescued-0-at-2.pt, rescued-2-at-2.pt")
    else:
        assert job.settle().ended is not None
        assert job.ended.exit_code == 0


def test_a_restart_while_ranks_are_recovering_begins_a_new_generation() -> None:
    job = held_in(Stage.RECOVERING)
    job.restart_controller()
    job.release()
    job.settle()
    first, second = job.machine.records
    assert job.where == (Stage.TRAINING, 3)
    assert (first.superseded, second.superseded) == (True, False)
    assert (second.cause, second.detail, second.failures) == (
        "controller restarted",
        "the controller was restarted",
        [],
    )
    assert [order.rank for order in job.orders(StartWorker)] == [0, 1, 2, None, None], "a spare, and no rank anew"
    job.finish_well()


def test_a_restart_in_start_up_restarts_all_ranks() -> None:
    """Groups that were connected by half cannot be connected any more, and no rank has anything to keep."""
    job = held_in(Stage.STARTING)
    job.restart_controller()
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    assert [order.rank for order in job.orders(StartWorker)] == [0, 1, 2, None, 0, 1, 2, None]
    job.finish_well()


def test_a_restart_before_the_ranks_have_their_nodes_changes_nothing() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, nodes={"a": 1}).join()
    job.restart_controller()
    assert job.where == (Stage.STARTING, 1)
    assert job.effects == []
    job.offer("b", 1)
    assert job.settle().where == (Stage.TRAINING, 1)
    job.finish_well()


def test_one_restart_after_the_other_is_survived() -> None:
    job = held_in(Stage.RECOVERING)
    job.release()
    for _ in range(4):
        job.restart_controller()
        while job.machine.stage is not Stage.RECOVERING:
            next(job.moves(training=False))[1]()
    assert job.settle().where == (Stage.TRAINING, 6)
    job.finish_well()


def test_a_restart_between_the_end_of_one_rank_and_the_end_of_another_loses_neither() -> None:
    job = SimulatedJob(world_size=2, num_spares=0, num_steps=3).bring_all(2, Phase.UPDATED)
    job.withhold(job.holder(1), StepsFinished)
    while move := next((move for what, move in job.moves(training=True) if "TRAINING" in what), None):
        move()
        job.settle()
    job.restart_controller()
    job.release()
    assert job.orders(Stop) == []
    job.finish_well()


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.RESCUING])
def test_a_deadline_that_came_during_the_outage_is_put_off(stage: Stage) -> None:
    """No process could meet it: answers had nowhere to go."""
    job = held_in(stage)
    due = job.machine.next_deadline()
    assert due is not None
    job.now_s += OUTAGE_S
    job.restart_controller()
    put_off = job.machine.next_deadline()
    assert put_off is not None
    assert put_off - job.now_s == pytest.approx(20.0, abs=0.01)
    assert job.machine.tick(put_off - 0.01) == []
    assert job.machine.stage is stage


def test_a_deadline_that_is_far_off_is_not_brought_forward() -> None:
    job = held_in(Stage.STOPPING)
    due = job.machine.next_deadline()
    job.restart_controller()
    assert job.machine.next_deadline() == due


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.FINISHED, Stage.ENDED])
def test_where_nothing_is_waited_for_a_restart_sets_no_deadline(stage: Stage) -> None:
    job = held_in(stage)
    job.restart_controller()
    assert job.machine.next_deadline() is None
