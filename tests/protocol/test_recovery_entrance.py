"""The one entrance of the controller's machine: what is old, unknown or too late changes nothing."""

import typing

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob, three_nodes

from keepstep.errors import InternalError
from keepstep.protocol import messages
from keepstep.protocol.messages import (
    Cause,
    CollectiveFailed,
    Drained,
    GroupsReset,
    Holding,
    JobStalled,
    NodeJoined,
    RankAwaited,
    RanksStand,
    Report,
    SafePointReached,
    StateRecovered,
    StateRefused,
    StateRescued,
    StepObserved,
    StepsFinished,
    StoreRequested,
    WorkerDone,
    WorkerFailed,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.waiting.operations import Standing, WaitsFor

# ---- The entrance ---------------------------------------------------------------------------------------------------


def state_of(thing: object, met: tuple[int, ...] = ()) -> object:
    """All that a machine knows, through every object that it is made of, as values that can be compared."""
    if isinstance(thing, dict):
        return {key: state_of(value, met) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [state_of(value, met) for value in thing]
    if isinstance(thing, set):
        return set(thing)
    if not type(thing).__module__.startswith("keepstep.protocol.recovery") or isinstance(thing, str):
        return thing
    if id(thing) in met:
        return type(thing).__name__
    kept = getattr(type(thing), "__slots__", getattr(thing, "__struct_fields__", ()))
    names = [*getattr(thing, "__dict__", ()), *kept]
    return {name: state_of(getattr(thing, name), (*met, id(thing))) for name in names}


def held_in(stage: Stage) -> SimulatedJob:
    """A job that was brought to a stage and is held there; beyond the start it has two recoveries behind it."""
    job = SimulatedJob(world_size=3, num_spares=3)
    if stage is Stage.STARTING:
        job.join()
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
    """One report of every type that is fenced by its generation, from the worker of rank 0 or from its node."""
    reports: list[messages.Report] = [
        CollectiveFailed(0, generation, "world", "connection reset"),
        StateRefused(0, generation, "mine['a'] is not what was restored", False),
        SafePointReached((0,), generation, 9, Phase.SYNCED, (9, 10), 9, (), False, (), None, None),
        GroupsReset((0,), generation),
        StateRecovered((0,), generation, 64, False),
        StepsFinished((0,), generation, 20, "0f0f"),
        Holding((0,), generation, 5),
        Drained((0,), generation, False),
        StepObserved(NODE, generation, 30, 5.0, 0.5, ()),
        JobStalled(NODE, generation, "all 3 ranks wait"),
        RanksStand(NODE, generation, (Standing(0, 9, Phase.SYNCED, WaitsFor.RANKS, 30.0, (), ""),)),
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
    remembered = job.machine.progress.trained_to, job.machine.progress.last_generation
    for generation in (job.machine.generation - 1, 1, job.machine.generation + 1):
        (old,) = [other for other in of_generation(generation) if type(other) is type(report)]
        assert job.machine.receive(NODE, old, job.now_s) == []
        if isinstance(old, StepObserved):
            assert job.machine.progress.trained_to == old.step + 1, "that it was completed stays true"
            job.machine.progress.trained_to, job.machine.progress.last_generation = remembered
        assert state_of(job.machine) == before


MEANINGFUL_IN = {
    CollectiveFailed: Stage.TRAINING,
    SafePointReached: Stage.STOPPING,
    GroupsReset: Stage.STOPPING,
    StateRecovered: Stage.RECOVERING,
    StepsFinished: Stage.TRAINING,
    StepObserved: Stage.TRAINING,
    JobStalled: Stage.TRAINING,
    RanksStand: Stage.TRAINING,
    Holding: Stage.TRAINING,
    Drained: Stage.TRAINING,
}


@pytest.mark.parametrize("kind", MEANINGFUL_IN, ids=lambda kind: kind.__name__)
def test_the_same_reports_do_change_something_in_their_own_generation(kind: type) -> None:
    job = held_in(MEANINGFUL_IN[kind])
    if kind in (Holding, Drained):
        job.machine.drain_asked("SIGTERM", job.now_s)
    before = state_of(job.machine)
    (report,) = [report for report in of_generation(job.machine.generation) if type(report) is kind]
    job.machine.receive(NODE, report, job.now_s)
    assert state_of(job.machine) != before


def test_nothing_is_heard_after_the_end() -> None:
    job = SimulatedJob(world_size=2, num_steps=3).finish()
    before = state_of(job.machine)
    for report in [*of_generation(1), NodeJoined(NODE, 9, "", 0, 0, (), 0), WorkerFenced(0)]:
        assert job.machine.receive(NODE, report, job.now_s) == []
    assert job.machine.tick(job.now_s + 1e6) == []
    assert state_of(job.machine) == before


def test_a_worker_that_is_not_known_is_not_heard() -> None:
    job = held_in(Stage.TRAINING)
    before = state_of(job.machine)
    assert job.machine.receive(NODE, WorkerLost(77, Cause.EXIT, "exit code 1", True, None, 0.0), job.now_s) == []
    assert job.machine.receive(NODE, WorkerJoined(77, 1), job.now_s) == []
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
        SafePointReached((hung.number,), 2, 3, Phase.BACKWARD, (3,), 3, (), False, (), None, None),
        WorkerReady(hung.number, 2, (3,), (), False, False, "0", 0.0),
        WorkerJoined(hung.number, 1),
        GroupsReset((hung.number,), 2),
        StateRecovered((hung.number,), 2, 0, False),
    ):
        assert job.machine.receive(NODE, report, job.now_s) == []
        assert state_of(job.machine) == before


def test_what_cannot_be_is_our_bug() -> None:
    job = SimulatedJob().settle()
    with pytest.raises(InternalError, match="rendezvous"):
        job.machine.receive(NODE, StoreRequested(0, 1, 1, "get", ("key",), b""), job.now_s)


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.STOPPING, Stage.RECOVERING])
def test_a_stall_means_nothing_outside_of_training(stage: Stage) -> None:
    job = held_in(stage)
    assert job.machine.stage is stage
    before = state_of(job.machine)
    assert job.say(JobStalled(NODE, job.machine.generation, "all 3 ranks wait")) == []
    assert state_of(job.machine) == before


# ---- Who may say what -----------------------------------------------------------------------------------------------


ABOUT_RANK_0 = [
    WorkerStarted(0, 1),
    RankAwaited(0),
    WorkerReady(0, 1, (0,), (7,), True, False, "0", 0.0),
    WorkerFailed(0, "ValueError: bad batch", "Traceback ...", False),
    StateRescued(0, "rescued-0.pt", None),
    WorkerLost(0, Cause.EXIT, "exit code 1", True, None, 0.0),
    WorkerDone(0, 3),
    WorkerFenced(0),
    CollectiveFailed(0, 1, "world", "connection reset"),
    StepsFinished((0,), 1, 20, "0f0f"),
]


@pytest.mark.parametrize("report", ABOUT_RANK_0, ids=lambda report: type(report).__name__)
def test_a_node_is_not_heard_about_the_worker_of_another(report: Report) -> None:
    job = three_nodes().settle()
    before = state_of(job.machine)
    assert job.say(report, "b") == []
    assert state_of(job.machine) == before
    job.say(report, "a")
    assert state_of(job.machine) != before


def test_an_answer_for_several_workers_counts_for_each_that_is_the_nodes_own() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.say(CollectiveFailed(0, 1, "world", "connection reset"))
    assert job.machine.awaited == {0, 1, 2, 3}
    answer = SafePointReached((0, 1, 2), 2, 3, Phase.BACKWARD, (3,), 3, (), False, (), None, None)
    job.say(answer, "a")
    assert job.machine.awaited == {2, 3}
    job.say(answer, "b")
    assert job.machine.awaited == {3}


def test_what_several_workers_received_is_added_up() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.lose_node("b")
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    job.say(StateRecovered((4, 6), 2, 100, False))
    assert job.machine.records[-1].received_bytes == 200


def test_the_slowest_and_the_last_node_tell_when_training_went_on() -> None:
    job = three_nodes().bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.settle()
    for node, at_s, step_s in (("a", 8.0, 0.1), ("b", 9.0, 0.2), ("c", 7.0, 0.3)):
        job.say(StepObserved(node, 2, 3, at_s, step_s, ()))
    record = job.machine.records[-1]
    assert (record.resumed_s, record.first_step_s) == (9.0, 0.3)
