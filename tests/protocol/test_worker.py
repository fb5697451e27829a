"""The worker's machine alone: what it says, and what it has its training thread do, order by order."""

from typing import Any

import pytest

from keepstep.errors import RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.messages import (
    Assign,
    CollectiveFailed,
    Complete,
    DoubtLifted,
    GroupsReset,
    Member,
    Membership,
    RankAwaited,
    Recover,
    Rescue,
    Resume,
    SafePointReached,
    StateRecovered,
    StateRefused,
    StepsFinished,
    Stop,
    Transfer,
    WorkerJoined,
    WorkerReady,
)
from keepstep.protocol.moves import (
    Build,
    Connect,
    End,
    Load,
    Move,
    Save,
    SaveAndEnd,
    SendReport,
    Train,
    Undo,
    Update,
    Wait,
)
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.resume import Action
from keepstep.protocol.worker import Urgency, WorkerMachine, WorkerState

MEMBERSHIP = Membership.of(Member(rank, "n", "0") for rank in range(3))
NUMBER, PID, RANK = 4, 1234, 1
EVENTS = {
    Phase.FORWARD: [StepEvent.STEP_ENTERED],
    Phase.BACKWARD: [StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN],
    Phase.SYNCED: [StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN, StepEvent.GRADIENTS_SYNCED],
    Phase.OPTIMIZER: [
        StepEvent.STEP_ENTERED,
        StepEvent.BACKWARD_BEGUN,
        StepEvent.GRADIENTS_SYNCED,
        StepEvent.BARRIER_LEFT,
    ],
    Phase.UPDATED: [],
}


def stop(generation: int, synced_step: int | None = None) -> Stop:
    return Stop(generation, "rank 0 lost", synced_step)


def moves(machine: WorkerMachine) -> list[msg.WorkerReport | Move]:
    """What the machine says, as reports, and the move after that."""
    said: list[msg.WorkerReport | Move] = []
    while isinstance(move := machine.next_move(), SendReport):
        said.append(move.report)
    return [*said, move]


def launched(rank: int | None = RANK) -> WorkerMachine:
    machine = WorkerMachine(NUMBER, PID, rank)
    assert machine.next_move() == SendReport(WorkerJoined(NUMBER, PID))
    return machine


def ready(snapshots: tuple[int, ...] = ()) -> WorkerMachine:
    """A rank that stands ready in generation 1."""
    machine = launched()
    machine.receive(Assign(NUMBER, 1, RANK, 0, 3, None, ()))
    assert moves(machine) == [Connect(1)]
    machine.connected()
    assert moves(machine) == [GroupsReset((NUMBER,), 1), Build()]
    machine.built("0", snapshots, False, 0.0)
    assert moves(machine) == [WorkerReady(NUMBER, 1, (0,), snapshots, False, False, "0", 0.0), Wait()]
    return machine


def load(generation: int, step: int, action: Action, *transfers: Transfer) -> Load:
    return Load(Recover(generation, step, transfers, MEMBERSHIP, (), None), action)


def resume(machine: WorkerMachine, generation: int) -> None:
    machine.loaded(0)
    assert moves(machine) == [StateRecovered((NUMBER,), generation, 0, False), Wait()]
    machine.receive(Resume(generation))
    assert moves(machine) == [Train()]


def training(phase: Phase = Phase.UPDATED, step: int = 0) -> WorkerMachine:
    """A rank of generation 1 in a phase of a step; UPDATED: just before it."""
    machine = ready()
    machine.receive(Recover(1, 0, (), MEMBERSHIP, (), None))
    assert moves(machine) == [load(1, 0, Action.STAY)]
    resume(machine, 1)
    for _ in range(step):
        for event in (*EVENTS[Phase.OPTIMIZER], StepEvent.STEP_COMPLETED):
            machine.steps.advance(event)
    for event in EVENTS[phase]:
        machine.steps.advance(event)
    return machine


def stopped(phase: Phase, step: int = 5, generation: int = 2) -> WorkerMachine:
    """A rank that was stopped in a phase of a step, has reported its safe point, and waits for the decision."""
    machine = training(phase, step)
    machine.receive(stop(generation))
    *_, last = moves(machine)
    if last == Undo():
        machine.undone()
        *_, last = moves(machine)
    assert last == Wait()
    return machine


def reconnect(machine: WorkerMachine, order: Recover) -> None:
    """Carries an order out as far as its groups' reset."""
    machine.receive(order)
    assert moves(machine) == [Connect(order.generation)]
    machine.connected()


def spare() -> WorkerMachine:
    """A spare that stands ready."""
    machine = launched(rank=None)
    assert moves(machine) == [Build()]
    machine.built("0", (), False, 0.0)
    assert moves(machine) == [WorkerReady(NUMBER, 0, (), (), False, False, "0", 0.0), Wait()]
    return machine


# ---- start -----------------------------------------------------------------------------------------------------------


def test_a_rank_joins_connects_builds_and_trains() -> None:
    machine = training()
    assert machine.steps.parameters_at == 0
    assert (machine.generation, machine.state) == (1, WorkerState.TRAINING)
    assert not machine.interrupted


def test_a_rank_waits_for_its_assignment() -> None:
    assert moves(launched()) == [Wait()]


def test_a_spare_awaits_its_rank_where_its_script_needs_one() -> None:
    machine = launched(rank=None)
    assert machine.await_rank() == RankAwaited(NUMBER)
    machine.receive(Assign(NUMBER, 2, RANK, 0, 3, None, ()))
    assert machine.rank == RANK
    assert machine.await_rank() is None
    assert machine.target_generation == 2


@pytest.mark.parametrize("assigned", [False, True])
def test_a_start_up_whose_generation_is_over_goes_on_in_echo_and_reaches_nothing(assigned: bool) -> None:
    machine = launched()
    if assigned:
        machine.receive(Assign(NUMBER, 1, RANK, 0, 3, None, ()))
    assert machine.receive(stop(2)) is Urgency.BREAK
    assert moves(machine) == [Build()]
    assert machine.used_echo
    machine.built("0", (), False, 0.0)
    ready = WorkerReady(NUMBER, 0, (), (), False, False, "0", 0.0)
    assert moves(machine) == [
        ready,
        SafePointReached((NUMBER,), 2, -1, Phase.STARTING, (), None, (), False, (), None, None),
        Wait(),
    ]


def test_a_start_up_that_cannot_connect_goes_on_in_echo() -> None:
    machine = launched()
    machine.receive(Assign(NUMBER, 1, RANK, 0, 3, None, ()))
    assert moves(machine) == [Connect(1)]
    machine.fell_out("connect", "no process came")
    assert moves(machine) == [CollectiveFailed(NUMBER, 1, "connect", "no process came"), Build()]
    assert (machine.generation, machine.used_echo) == (0, True)


def test_a_start_up_in_which_something_was_echoed_reaches_nothing() -> None:
    machine = launched()
    machine.receive(Assign(NUMBER, 1, RANK, 0, 3, None, ()))
    moves(machine)
    machine.connected()
    machine.echoed()
    moves(machine)
    machine.built("0", (), False, 0.0)
    assert moves(machine) == [WorkerReady(NUMBER, 1, (), (), False, False, "0", 0.0), Wait()]


def test_a_job_that_is_started_again_rewinds_to_its_checkpoint() -> None:
    machine = ready(snapshots=(10, 20))
    machine.receive(Recover(1, 20, (), MEMBERSHIP, (), None))
    assert moves(machine) == [load(1, 20, Action.REWIND)]
    assert machine.own_reach() == ()
    resume(machine, 1)
    assert machine.steps.parameters_at == 20


# ---- stop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "reach", "current"),
    [(Phase.FORWARD, (5,), 5), (Phase.BACKWARD, (5,), 5), (Phase.SYNCED, (5, 6), 5)],
)
def test_a_rank_says_where_it_was_stopped_and_where_it_can_be(
    phase: Phase, reach: tuple[int, ...], current: int
) -> None:
    machine = training(phase, 5)
    assert machine.receive(stop(2)) is Urgency.BREAK
    assert machine.interrupted
    assert machine.owes_safe_point
    machine.holds((3,), ())
    if phase is not Phase.SYNCED:
        assert moves(machine) == [Undo()]
        machine.undone()
        assert (machine.steps.phase, machine.steps.step) == (Phase.UPDATED, 4)
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, phase, reach, current, (3,), False, (), None, None),
        Wait(),
    ]
    assert not machine.owes_safe_point


def test_an_update_is_completed_before_the_safe_point() -> None:
    machine = training(Phase.OPTIMIZER, 5)
    machine.receive(stop(2))
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_an_update_that_a_missing_value_has_got_into_is_torn() -> None:
    machine = training(Phase.OPTIMIZER, 5)
    machine.receive(stop(2))
    machine.lost_value()
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    machine.found_partially_updated(None, "bad")
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.UPDATED, (), None, (), False, (), None, "its copy was given up: bad"),
        Wait(),
    ]


def in_doubt() -> WorkerMachine:
    machine = training(Phase.OPTIMIZER, 5)
    machine.receive(stop(2))
    machine.lost_value()
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    machine.found_partially_updated("digest", "bad")
    assert moves(machine) == [
        SafePointReached(
            (NUMBER,), 2, 5, Phase.UPDATED, (), None, (), False, (), "digest", "its copy was given up: bad"
        ),
        Wait(),
    ]
    return machine


def test_a_copy_in_doubt_counts_as_soon_as_the_controller_says_so() -> None:
    machine = in_doubt()
    machine.receive(DoubtLifted(2, (NUMBER + 1,)))
    assert machine.own_reach() == ()
    machine.receive(DoubtLifted(2, (NUMBER + 1, NUMBER)))
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]
    recover = Recover(3, 6, (), MEMBERSHIP, (), None)
    machine.receive(recover)
    reconnect(machine, recover)
    assert moves(machine)[-1] == Load(recover, Action.STAY)


def test_a_copy_in_doubt_that_is_restored_is_no_longer_in_doubt() -> None:
    machine = in_doubt()
    reconnect(machine, Recover(2, 6, (Transfer((0,), (RANK,)),), MEMBERSHIP, (), None))
    assert moves(machine)[-1].action is Action.RESTORE
    assert machine.doubt is None
    machine.receive(DoubtLifted(2, (NUMBER,)))
    assert machine.own_reach() == ()


def test_an_update_that_no_missing_value_has_got_into_is_whole() -> None:
    machine = training(Phase.OPTIMIZER, 5)
    machine.receive(stop(2))
    machine.echoed()
    machine.lost_value()
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    assert machine.own_reach() == ()  # until it is known
    machine.found_whole()
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_a_copy_that_is_half_restored_is_not_found_whole() -> None:
    machine = training(Phase.UPDATED, 5)
    machine.partially_updated = True
    machine.found_whole()
    assert machine.partially_updated


@pytest.mark.parametrize(
    ("why", "synced_step", "repeats"),
    [
        pytest.param({"communicates_in_update": True}, 5, True, id="its update holds a collective"),
        pytest.param({"boundary": 5}, None, True, id="the lost rank may not have made its calls"),
        pytest.param({"boundary": 5}, 5, False, id="the lost rank has made its calls"),
        pytest.param({"boundary": 4}, None, False, id="a step with an update"),
    ],
)
def test_a_synced_rank_tells_whether_it_would_rather_repeat_its_step(
    why: dict[str, Any], synced_step: int | None, repeats: bool
) -> None:
    machine = training(Phase.OPTIMIZER, 4)
    for name, value in why.items():
        setattr(machine, name, value)
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    for event in (StepEvent.STEP_ENTERED, StepEvent.BACKWARD_BEGUN, StepEvent.GRADIENTS_SYNCED):
        machine.steps.advance(event)
    machine.receive(stop(2, synced_step))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.SYNCED, (5, 6), 5, (), repeats, (), None, None),
        Wait(),
    ]
    machine.receive(Recover(2, 5, (Transfer((RANK,), (0,)),), MEMBERSHIP, (), None))
    assert moves(machine) == [Undo()]


def test_a_step_that_is_undone_before_the_machine_is_asked_is_reported_as_stopped_in() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2))
    machine.undone()
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.BACKWARD, (5,), 5, (), False, (), None, None),
        Wait(),
    ]


def test_the_same_stop_again_is_no_news() -> None:
    machine = stopped(Phase.UPDATED)
    assert machine.receive(stop(2)) is Urgency.NONE
    assert moves(machine) == [Wait()]


def test_a_failed_collective_is_reported_once_and_stops_the_rank() -> None:
    machine = training(Phase.BACKWARD, 5)
    assert machine.collective_failed("world", "reset") == CollectiveFailed(NUMBER, 1, "world", "reset")
    assert machine.collective_failed("world", "reset") is None
    assert machine.interrupted
    assert moves(machine) == [Undo()]
    machine.undone()
    assert moves(machine) == [Wait()]
    machine.receive(stop(2))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.BACKWARD, (5,), 5, (), False, (), None, None),
        Wait(),
    ]


def test_a_collective_that_fails_after_the_stop_is_not_told() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2))
    assert machine.collective_failed("world", "reset") is None


def test_an_abandoned_rank_breaks_its_groups() -> None:
    assert training().receive(msg.Abandon("rank 0 lost")) is Urgency.BREAK


# ---- settling --------------------------------------------------------------------------------------------------------


def test_the_backward_of_a_step_whose_lost_rank_was_synced_comes_to_its_end() -> None:
    machine = training(Phase.BACKWARD, 5)
    assert machine.receive(stop(2, synced_step=5)) is Urgency.SETTLE
    assert not machine.interrupted
    machine.steps.advance(StepEvent.GRADIENTS_SYNCED)
    assert machine.settled() is Urgency.BREAK
    assert machine.interrupted
    assert machine.settled(2) is Urgency.NONE
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.SYNCED, (5, 6), 5, (), False, (), None, None),
        Wait(),
    ]


def test_calls_at_a_boundary_at_which_the_lost_rank_was_synced_come_to_their_end() -> None:
    machine = training(Phase.FORWARD, 5)
    machine.boundary = 5
    assert machine.receive(stop(2, synced_step=5)) is Urgency.SETTLE
    assert not machine.interrupted


def test_a_backward_has_its_time_to_settle_and_no_more() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2, synced_step=5))
    assert machine.settled(2) is Urgency.BREAK
    assert moves(machine) == [Undo()]


def test_the_time_of_one_stop_does_not_end_the_settling_of_another() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2, synced_step=5))
    assert machine.receive(stop(3, synced_step=5)) is Urgency.SETTLE
    assert machine.settled(2) is Urgency.NONE
    assert machine.settled(3) is Urgency.BREAK


@pytest.mark.parametrize(("phase", "synced_step"), [(Phase.BACKWARD, 4), (Phase.BACKWARD, None), (Phase.FORWARD, 5)])
def test_nothing_settles_but_the_backward_of_that_step(phase: Phase, synced_step: int | None) -> None:
    assert training(phase, 5).receive(stop(2, synced_step)) is Urgency.BREAK


def test_a_backward_that_has_failed_does_not_settle() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.collective_failed("world", "reset")
    assert machine.receive(stop(2, synced_step=5)) is Urgency.BREAK
    assert machine.settled(2) is Urgency.NONE, "its time would break the groups of the next generation"


def test_another_loss_ends_the_settling() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2, synced_step=5))
    assert machine.receive(stop(3)) is Urgency.BREAK
    assert machine.interrupted


# ---- the barrier -----------------------------------------------------------------------------------------------------


def test_a_synced_rank_advances_when_the_job_resumes_after_the_step() -> None:
    machine = stopped(Phase.SYNCED)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Update()]
    machine.steps.advance(StepEvent.BARRIER_LEFT)
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    assert moves(machine) == [Connect(2)]
    machine.connected()
    assert moves(machine) == [GroupsReset((NUMBER,), 2), load(2, 6, Action.STAY)]
    resume(machine, 2)
    assert machine.steps.parameters_at == 6


def test_a_synced_rank_undoes_its_step_when_the_job_resumes_before_it() -> None:
    machine = stopped(Phase.SYNCED)
    machine.receive(Recover(2, 5, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Undo()]
    machine.undone()
    assert moves(machine) == [Connect(2)]
    machine.connected()
    assert moves(machine) == [GroupsReset((NUMBER,), 2), load(2, 5, Action.STAY)]
    resume(machine, 2)
    assert machine.steps.parameters_at == 5


def test_a_failure_while_a_synced_rank_waits_finds_it_synced_still() -> None:
    machine = stopped(Phase.SYNCED)
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.SYNCED, (5, 6), 5, (), False, (), None, None),
        Wait(),
    ]


def test_a_failure_while_a_rank_advances_finds_it_after_the_step() -> None:
    machine = stopped(Phase.SYNCED)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Update()]
    machine.steps.advance(StepEvent.BARRIER_LEFT)
    machine.receive(stop(3))
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_a_rank_whose_ordered_update_was_echoed_does_not_go_on_with_it() -> None:
    machine = stopped(Phase.SYNCED)
    machine.receive(Recover(2, 6, (Transfer((RANK,), (0,)),), MEMBERSHIP, (), None))
    assert moves(machine) == [Update()]
    machine.steps.advance(StepEvent.BARRIER_LEFT)
    machine.lost_value()
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    machine.found_partially_updated(None, "bad")
    hint, wait = moves(machine)
    assert isinstance(hint, CollectiveFailed)
    assert (hint.generation, hint.group, wait) == (2, "update", Wait())
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (), None, (), False, (), None, "its copy was given up: bad"),
        Wait(),
    ]


# ---- recover ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_read_a_checkpoint_says_so() -> None:
    machine = spare()
    machine.receive(Assign(NUMBER, 2, RANK, 0, 3, None, ()))
    machine.holds((5,), ())
    reconnect(machine, Recover(2, 5, (), MEMBERSHIP, (), None))
    assert moves(machine) == [GroupsReset((NUMBER,), 2), load(2, 5, Action.REWIND)]
    machine.loaded(0, from_checkpoint=True)
    assert moves(machine) == [StateRecovered((NUMBER,), 2, 0, from_checkpoint=True), Wait()]


def test_a_spare_takes_a_rank_and_restores() -> None:
    machine = spare()
    machine.receive(Assign(NUMBER, 2, RANK, 0, 3, None, ()))
    transfer = Transfer((0, 2), (RANK,))
    reconnect(machine, Recover(2, 5, (transfer,), MEMBERSHIP, (), None))
    assert moves(machine) == [GroupsReset((NUMBER,), 2), load(2, 5, Action.RESTORE, transfer)]
    assert machine.own_reach() == ()
    machine.loaded(1000)
    assert moves(machine) == [StateRecovered((NUMBER,), 2, 1000, False), Wait()]
    machine.receive(Resume(2))
    assert moves(machine) == [Train()]
    assert machine.steps.parameters_at == 5


def test_a_survivor_that_is_behind_restores() -> None:
    machine = stopped(Phase.BACKWARD)
    transfer = Transfer((2,), (0, RANK))
    reconnect(machine, Recover(2, 6, (transfer,), MEMBERSHIP, (), None))
    assert moves(machine)[-1] == load(2, 6, Action.RESTORE, transfer)
    resume(machine, 2)
    assert machine.steps.parameters_at == 6


def test_a_source_stays_and_sends() -> None:
    machine = stopped(Phase.UPDATED, 6)
    transfer = Transfer((RANK,), (0,))
    reconnect(machine, Recover(2, 6, (Transfer((7,), (8,)), transfer), MEMBERSHIP, (), None))
    assert moves(machine)[-1] == load(2, 6, Action.STAY, Transfer((7,), (8,)), transfer)
    assert machine.own_reach() == (6,)


@pytest.mark.parametrize("receives", [False, True])
def test_a_broken_transfer_tears_the_receiver_and_not_the_source(receives: bool) -> None:
    machine = stopped(Phase.UPDATED, 6)
    transfer = Transfer((0,), (RANK,)) if receives else Transfer((RANK,), (0,))
    reconnect(machine, Recover(2, 6, (transfer,), MEMBERSHIP, (), None))
    moves(machine)
    machine.fell_out("restore", "connection reset")
    assert moves(machine) == [CollectiveFailed(NUMBER, 2, "restore", "connection reset"), Wait()]
    machine.receive(stop(3))
    reach, current = ((), None) if receives else ((6,), 6)
    flaw = "it had not yet received the whole state" if receives else None
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, reach, current, (), False, (), None, flaw),
        Wait(),
    ]


@pytest.mark.parametrize("has_come", [False, True])
def test_state_that_is_not_what_was_loaded_is_no_copy(has_come: bool) -> None:
    """It is told, even if the next stop has come."""
    machine = stopped(Phase.UPDATED, 6)
    reconnect(machine, Recover(2, 6, (Transfer((0,), (RANK,)),), MEMBERSHIP, (), None))
    moves(machine)
    if has_come:
        machine.receive(stop(3))
    machine.refused("model.mean is not what was restored")
    told = moves(machine)
    assert told[0] == StateRefused(NUMBER, 2, "model.mean is not what was restored", False)
    if not has_come:
        machine.receive(stop(3))
        told = moves(machine)
    flaw = "model.mean is not what was restored"
    assert told[-2:] == [SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (), None, (), False, (), None, flaw), Wait()]


def test_a_torn_rank_that_is_restored_is_whole_again() -> None:
    machine = stopped(Phase.UPDATED, 6)
    transfer = Transfer((0,), (RANK,))
    reconnect(machine, Recover(2, 6, (transfer,), MEMBERSHIP, (), None))
    moves(machine)
    machine.fell_out("restore", "connection reset")
    machine.receive(stop(3))
    moves(machine)
    reconnect(machine, Recover(3, 7, (transfer,), MEMBERSHIP, (), None))
    assert moves(machine)[-1] == load(3, 7, Action.RESTORE, transfer)
    resume(machine, 3)
    assert machine.own_reach() == (7,)


def test_a_rank_that_cannot_connect_does_not_try_again_in_the_same_generation() -> None:
    machine = stopped(Phase.UPDATED, 6)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Connect(2)]
    machine.fell_out("connect", "no process came")
    assert moves(machine) == [CollectiveFailed(NUMBER, 2, "connect", "no process came"), Wait()]
    machine.receive(stop(3))
    moves(machine)
    machine.receive(Recover(3, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Connect(3)]


def test_a_rank_that_falls_out_of_a_generation_that_is_over_reports_no_failure() -> None:
    machine = stopped(Phase.UPDATED, 6)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    moves(machine)
    machine.receive(stop(3))
    machine.fell_out("connect", "taken down")
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_a_recover_that_leaves_a_rank_with_nothing_breaks_the_protocol() -> None:
    machine = stopped(Phase.UPDATED, 6)
    reconnect(machine, Recover(2, 7, (), MEMBERSHIP, (), None))
    with pytest.raises(RemoteProtocolError, match="rank 1 is to resume at step 7, can be at"):
        moves(machine)


# ---- failures during a recovery --------------------------------------------------------------------------------------


def test_a_stop_while_standing_is_answered() -> None:
    machine = stopped(Phase.BACKWARD)
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.BACKWARD, (5,), 5, (), False, (), None, None),
        Wait(),
    ]


def test_a_recover_of_a_generation_that_is_over_is_ignored() -> None:
    machine = stopped(Phase.UPDATED, 6)
    machine.receive(stop(3))
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    assert isinstance(moves(machine)[-1], Wait)
    machine.receive(Recover(3, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Connect(3)]


def test_a_recover_that_a_stop_overtakes_is_not_carried_out() -> None:
    machine = stopped(Phase.UPDATED, 6)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_a_stop_while_connecting_finds_the_rank_where_it_was_stopped() -> None:
    machine = stopped(Phase.BACKWARD)
    machine.receive(Recover(2, 5, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Connect(2)]
    machine.receive(stop(3))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.BACKWARD, (5,), 5, (), False, (), None, None),
        Wait(),
    ]


def test_a_stop_that_comes_as_the_groups_are_connected_ends_that_generation() -> None:
    machine = stopped(Phase.UPDATED, 6)
    machine.receive(Recover(2, 6, (), MEMBERSHIP, (), None))
    assert moves(machine) == [Connect(2)]
    machine.receive(stop(3))
    machine.connected()
    assert machine.generation == 2
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]


def test_a_stop_before_the_state_is_loaded_leaves_it_whole() -> None:
    machine = stopped(Phase.UPDATED, 6)
    reconnect(machine, Recover(2, 7, (Transfer((0,), (RANK,)),), MEMBERSHIP, (), None))
    machine.receive(stop(3))
    report = SafePointReached((NUMBER,), 3, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None)
    assert moves(machine) == [GroupsReset((NUMBER,), 2), report, Wait()]


def test_a_stop_while_all_recover_is_answered_from_the_resume_step() -> None:
    machine = stopped(Phase.BACKWARD)
    reconnect(machine, Recover(2, 5, (), MEMBERSHIP, (), None))
    moves(machine)
    machine.loaded(0)
    moves(machine)
    machine.receive(stop(3))
    machine.receive(Resume(2))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 3, 4, Phase.UPDATED, (5,), 5, (), False, (), None, None),
        Wait(),
    ]


def test_a_spare_that_is_stopped_before_it_is_ready_reports_that_it_reaches_nothing() -> None:
    machine = launched(rank=None)
    moves(machine)
    machine.receive(Assign(NUMBER, 2, RANK, 0, 3, None, ()))
    machine.receive(stop(3))
    machine.built("0", (), False, 0.0)
    report = SafePointReached((NUMBER,), 3, -1, Phase.STARTING, (), None, (), False, (), None, None)
    assert moves(machine) == [WorkerReady(NUMBER, 0, (), (), False, False, "0", 0.0), report, Wait()]


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_the_script_goes_on_when_all_ranks_have_finished() -> None:
    machine = training(Phase.UPDATED, 6)
    machine.finished("abc")
    assert moves(machine) == [StepsFinished((NUMBER,), 1, 6, "abc"), Wait()]
    machine.receive(Complete(1))
    assert moves(machine) == [End()]
    assert machine.collective_failed("world", "reset") is None
    assert moves(machine) == [End()]


def test_a_failure_before_all_have_finished_is_recovered_from() -> None:
    machine = training(Phase.UPDATED, 6)
    machine.finished(None)
    moves(machine)
    machine.receive(stop(2))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 5, Phase.UPDATED, (6,), 6, (), False, (), None, None),
        Wait(),
    ]
    machine.receive(Complete(1))
    assert moves(machine) == [Wait()]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.SYNCED])
def test_a_rescue_is_carried_out_where_a_rank_stands(phase: Phase) -> None:
    machine = stopped(phase)
    rescue = Rescue("--max-restarts is used up", False)
    machine.receive(rescue)
    assert moves(machine) == [SaveAndEnd(rescue)]


def test_a_rescue_waits_until_the_rank_stands() -> None:
    machine = training(Phase.BACKWARD, 5)
    machine.receive(stop(2))
    rescue = Rescue("--max-restarts is used up", False)
    machine.receive(rescue)
    assert moves(machine) == [Undo()]
    machine.undone()
    assert moves(machine) == [SaveAndEnd(rescue)]


# ---- the drain -------------------------------------------------------------------------------------------------------


def step_on(machine: WorkerMachine) -> None:
    for event in (*EVENTS[Phase.OPTIMIZER], StepEvent.STEP_COMPLETED):
        machine.steps.advance(event)


def held(machine: WorkerMachine) -> msg.Holding | None:
    assert machine.receive(msg.Hold(1)) is Urgency.NONE
    return machine.holding()


def test_a_rank_holds_before_its_next_step_and_goes_on_to_the_last() -> None:
    machine = training(Phase.BACKWARD)
    assert held(machine) == msg.Holding((NUMBER,), 1, 1)
    assert machine.holding() is None, "it is said once"
    for event in EVENTS[Phase.OPTIMIZER][2:]:
        machine.steps.advance(event)
    machine.steps.advance(StepEvent.STEP_COMPLETED)
    assert moves(machine) == [Wait()]
    machine.receive(msg.Drain(1, 2))
    assert moves(machine) == [Train()]
    step_on(machine)
    assert moves(machine) == [Save(2)]
    machine.saved(True)
    assert moves(machine) == [msg.Drained((NUMBER,), 1, True), Wait()]
    assert not machine.terminated
    machine.receive(msg.Terminate("SIGTERM"))
    assert moves(machine) == [End()]


def test_a_step_that_was_handed_out_is_not_taken_back() -> None:
    machine = training(Phase.UPDATED)
    assert moves(machine) == [Train()]
    assert held(machine) == msg.Holding((NUMBER,), 1, 1)


def test_a_rank_that_stands_at_the_resume_step_holds_there() -> None:
    machine = ready()
    machine.receive(Recover(1, 0, (), MEMBERSHIP, (), None))
    assert moves(machine) == [load(1, 0, Action.STAY)]
    machine.loaded(0)
    moves(machine)
    machine.receive(Resume(1))
    assert held(machine) == msg.Holding((NUMBER,), 1, 0)
    assert moves(machine) == [Wait()]


def test_what_was_agreed_in_a_generation_that_is_over_counts_no_more() -> None:
    machine = training(Phase.UPDATED, 3)
    held(machine)
    machine.receive(stop(2))
    machine.receive(msg.Hold(1))
    moves(machine)
    reconnect(machine, Recover(2, 3, (), MEMBERSHIP, (), None))
    assert moves(machine)[-1] == load(2, 3, Action.STAY)
    resume(machine, 2)
    machine.receive(msg.Drain(1, 3))
    assert moves(machine) == [Train()]


def test_a_rank_ends_where_all_stand_after_a_recovery() -> None:
    machine = training(Phase.UPDATED, 3)
    machine.receive(stop(2))
    moves(machine)
    reconnect(machine, Recover(2, 3, (), MEMBERSHIP, (), None))
    assert moves(machine)[-1] == load(2, 3, Action.STAY)
    machine.loaded(0)
    assert moves(machine) == [StateRecovered((NUMBER,), 2, 0, False), Wait()]
    machine.receive(msg.Drain(2, 3))
    assert moves(machine) == [Save(3)]


def test_a_failure_after_a_rank_has_saved_is_recovered_from() -> None:
    machine = training(Phase.UPDATED, 3)
    machine.receive(msg.Drain(1, 3))
    assert moves(machine) == [Save(3)]
    machine.saved(False)
    moves(machine)
    machine.receive(stop(2))
    assert moves(machine) == [
        SafePointReached((NUMBER,), 2, 2, Phase.UPDATED, (3,), 3, (), False, (), None, None),
        Wait(),
    ]


def test_a_rank_that_has_finished_its_loop_ends_at_its_last_step_too() -> None:
    machine = training(Phase.UPDATED, 6)
    machine.finished(None)
    moves(machine)
    machine.receive(msg.Drain(1, 6))
    assert moves(machine) == [Save(6)]


def test_a_drain_beyond_the_last_step_leaves_the_loop_to_its_end() -> None:
    machine = training(Phase.UPDATED, 6)
    machine.finished(None)
    moves(machine)
    machine.receive(msg.Drain(1, 7))
    assert moves(machine) == [Wait()]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_step_in_which_a_rank_refuses_its_state_is_undone_everywhere(is_refused: bool) -> None:
    """It holds no copy then, and the others hold the step's beginning; none of them reports a failed collective."""
    machine = training(Phase.BACKWARD, 5)
    if is_refused:
        machine.refused("it differs from its replicas")
    else:
        machine.breaks_off()
    assert machine.interrupted
    told = moves(machine)
    assert told[:1] == ([StateRefused(NUMBER, 1, "it differs from its replicas", False)] if is_refused else [Undo()])
    machine.undone()
    machine.receive(stop(2))
    [report] = [each for each in moves(machine) if isinstance(each, SafePointReached)]
    assert report.reach == (() if is_refused else (5,))


def test_a_rank_that_stands_apart_says_so_and_trains_on() -> None:
    machine = training(Phase.UPDATED, 5)
    machine.stands_apart("it differs from its replicas")
    assert moves(machine)[:2] == [StateRefused(NUMBER, 1, "it differs from its replicas", True), Train()]
    assert not machine.interrupted
