"""The one entrance of the controller's machine: what is old, unknown or too late changes nothing."""

import copy
import typing

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.errors import InternalError
from keepstep.protocol import messages
from keepstep.protocol.messages import (
    AgentJoined,
    Cause,
    CollectiveFailed,
    GroupsReset,
    JobStalled,
    SafePointReached,
    StateRecovered,
    StepObserved,
    StoreRequested,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, Stage

# ---- The entrance ---------------------------------------------------------------------------------------------------


def state_of(machine: RecoveryMachine) -> dict[str, object]:
    return copy.deepcopy({name: value for name, value in vars(machine).items() if name != "settings"})


def held_in(stage: Stage) -> SimulatedJob:
    """A job that was brought to a stage and is held there; beyond the start it has two recoveries behind it."""
    job = SimulatedJob(world_size=3, num_spares=3)
    if stage is Stage.STARTING:
        job.say(job.reports["agent"].popleft())
        job.withhold(job.workers[1], WorkerReady)
        return job.settle()
    job.settle()
    for step in (2, 4):
        job.bring_all(step, Phase.BACKWARD)
        job.kill(job.holder(2))
        job.settle()
    held = {Stage.STOPPING: SafePointReached, Stage.RECOVERING: StateRecovered}.get(stage)
    if held is not None:
        job.bring_all(6, Phase.BACKWARD)
        job.withhold(job.holder(0), held)
        job.kill(job.holder(1))
    return job.settle()


def of_generation(generation: int) -> list[messages.Report]:
    """One report of every type that is fenced by its generation, from the worker of rank 0."""
    reports: list[messages.Report] = [
        CollectiveFailed(0, generation, "world", "connection reset"),
        SafePointReached(0, generation, 9, Phase.SYNCED, (9, 10), 9, ()),
        GroupsReset(0, generation),
        StateRecovered(0, generation, 64),
        messages.StepsFinished(0, generation, 20, "0f0f"),
        StepObserved(0, generation, 30, 5.0, 0.5),
    ]
    return reports


def test_every_report_with_a_generation_is_among_those_tried() -> None:
    fenced = {kind for kind in typing.get_args(messages.Report) if "generation" in kind.__struct_fields__}
    assert fenced - {WorkerReady, StoreRequested} == {type(report) for report in of_generation(1)}


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.STOPPING, Stage.RECOVERING])
@pytest.mark.parametrize("report", of_generation(0), ids=lambda report: type(report).__name__)
def test_a_report_of_another_generation_changes_nothing(report: messages.Report, stage: Stage) -> None:
    job = held_in(stage)
    assert job.machine.stage is stage
    before = state_of(job.machine)
    for generation in (job.machine.generation - 1, 1, job.machine.generation + 1):
        (old,) = [other for other in of_generation(generation) if type(other) is type(report)]
        assert job.machine.receive(old, job.now_s) == []
        assert state_of(job.machine) == before


MEANINGFUL_IN = {
    CollectiveFailed: Stage.TRAINING,
    SafePointReached: Stage.STOPPING,
    GroupsReset: Stage.STOPPING,
    StateRecovered: Stage.RECOVERING,
    messages.StepsFinished: Stage.TRAINING,
    StepObserved: Stage.TRAINING,
}


@pytest.mark.parametrize("kind", MEANINGFUL_IN, ids=lambda kind: kind.__name__)
def test_the_same_reports_do_change_something_in_their_own_generation(kind: type) -> None:
    job = held_in(MEANINGFUL_IN[kind])
    before = state_of(job.machine)
    (report,) = [report for report in of_generation(job.machine.generation) if type(report) is kind]
    job.machine.receive(report, job.now_s)
    assert state_of(job.machine) != before


def test_nothing_is_heard_after_the_end() -> None:
    job = SimulatedJob(world_size=2, num_steps=3).finish()
    before = state_of(job.machine)
    for report in [*of_generation(1), JobStalled(NODE, "all wait"), AgentJoined(NODE), WorkerFenced(0)]:
        assert job.machine.receive(report, job.now_s) == []
    assert job.machine.tick(job.now_s + 1e6) == []
    assert state_of(job.machine) == before


def test_a_worker_that_is_not_known_is_not_heard() -> None:
    job = held_in(Stage.TRAINING)
    before = state_of(job.machine)
    assert job.machine.receive(WorkerLost(77, Cause.EXIT, "exit code 1", True, None, 0.0), job.now_s) == []
    assert job.machine.receive(WorkerJoined(77, 1), job.now_s) == []
    assert state_of(job.machine) == before


def test_a_lost_worker_is_not_heard_as_if_it_lived() -> None:
    """A hung rank may come to life before it is fenced, and say what it should have said."""
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    hung = job.holder(1)
    job.withhold(hung, WorkerFenced)
    job.hang(hung)
    job.settle()
    before = state_of(job.machine)
    for report in (
        SafePointReached(hung.number, 2, 3, Phase.BACKWARD, (3,), 3, ()),
        WorkerReady(hung.number, 2, (3,), (), False, "0"),
        WorkerJoined(hung.number, 1),
        GroupsReset(hung.number, 2),
        StateRecovered(hung.number, 2, 0),
    ):
        assert job.machine.receive(report, job.now_s) == []
        assert state_of(job.machine) == before


def test_what_cannot_be_is_our_bug() -> None:
    job = SimulatedJob().settle()
    with pytest.raises(InternalError, match="a second node, node-b"):
        job.machine.receive(AgentJoined("node-b"), job.now_s)
    with pytest.raises(InternalError, match="rendezvous"):
        job.machine.receive(StoreRequested(0, 1, 1, "get", ("key",), b""), job.now_s)


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.STOPPING, Stage.RECOVERING])
def test_a_stall_means_nothing_outside_of_training(stage: Stage) -> None:
    job = held_in(stage)
    assert job.machine.stage is stage
    before = state_of(job.machine)
    assert job.say(JobStalled(NODE, "all 3 ranks wait")) == []
    assert state_of(job.machine) == before
