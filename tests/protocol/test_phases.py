"""The life of a step: `StepMachine` walks its table and nothing else."""

import itertools

import pytest

from keepstep.errors import LocalProtocolError
from keepstep.protocol.phases import TRANSITIONS, Phase, StepEvent, StepMachine

# Written down a second time, by hand: a slip of the table in the source must not pass because it is its own test.
ALLOWED = {
    ("starting", "state restored"): "updated",
    ("updated", "state restored"): "updated",
    ("updated", "step entered"): "forward",
    ("forward", "backward begun"): "backward",
    ("backward", "forward begun"): "forward",
    ("forward", "gradients synced"): "synced",
    ("backward", "gradients synced"): "synced",
    ("synced", "barrier left"): "optimizer",
    ("optimizer", "step completed"): "updated",
    ("forward", "step undone"): "updated",
    ("backward", "step undone"): "updated",
    ("synced", "step undone"): "updated",
}
STEP_CHANGES = {StepEvent.STEP_ENTERED: 1, StepEvent.STEP_UNDONE: -1}
PAIRS = list(itertools.product(Phase, StepEvent))

WHOLE_STEP = [
    StepEvent.STEP_ENTERED,
    StepEvent.BACKWARD_BEGUN,
    StepEvent.GRADIENTS_SYNCED,
    StepEvent.BARRIER_LEFT,
    StepEvent.STEP_COMPLETED,
]


def test_the_table_is_the_one_of_the_design() -> None:
    assert {(str(phase), str(event)): str(target) for (phase, event), target in TRANSITIONS.items()} == ALLOWED


@pytest.mark.parametrize(("phase", "event"), [pair for pair in PAIRS if pair in ALLOWED], ids=str)
def test_an_allowed_event_moves_along_the_table(phase: Phase, event: StepEvent) -> None:
    machine = StepMachine(7, phase)
    assert machine.advance(event) is machine.phase is Phase(ALLOWED[phase, event])
    assert machine.step == 7 + STEP_CHANGES.get(event, 0)


@pytest.mark.parametrize(("phase", "event"), [pair for pair in PAIRS if pair not in ALLOWED], ids=str)
def test_any_other_event_raises_and_changes_nothing(phase: Phase, event: StepEvent) -> None:
    machine = StepMachine(7, phase)
    with pytest.raises(LocalProtocolError, match=rf"'{event}' cannot happen in phase '{phase}' of step 7"):
        machine.advance(event)
    assert machine == StepMachine(7, phase)


def test_a_new_machine_must_be_restored_before_its_first_step() -> None:
    machine = StepMachine()
    assert (machine.step, machine.phase, machine.parameters_at) == (-1, Phase.STARTING, None)
    machine.restored(0)
    assert (machine.step, machine.phase, machine.parameters_at) == (-1, Phase.UPDATED, 0)


def test_parameters_through_a_whole_step() -> None:
    machine = StepMachine(4, Phase.UPDATED)
    seen = [machine.parameters_at]
    for event in WHOLE_STEP:
        machine.advance(event)
        seen.append(machine.parameters_at)
    assert seen == [5, 5, 5, 5, None, 6]
    assert machine.step == 5


@pytest.mark.parametrize("num_events", [1, 2, 3])
def test_an_undone_step_leaves_the_parameters_where_they_were(num_events: int) -> None:
    machine = StepMachine(4, Phase.UPDATED)
    for event in [*WHOLE_STEP[:num_events], StepEvent.STEP_UNDONE]:
        machine.advance(event)
    assert machine == StepMachine(4, Phase.UPDATED)
    assert machine.parameters_at == 5


def test_forward_and_backward_may_alternate_within_a_step() -> None:
    machine = StepMachine(4, Phase.UPDATED)
    machine.advance(StepEvent.STEP_ENTERED)
    for _ in range(3):  # gradient accumulation
        machine.advance(StepEvent.BACKWARD_BEGUN)
        machine.advance(StepEvent.FORWARD_BEGUN)
    assert machine == StepMachine(5, Phase.FORWARD)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.UPDATED])
@pytest.mark.parametrize("step", [0, 3, 40])
def test_restored_stands_between_two_steps(phase: Phase, step: int) -> None:
    machine = StepMachine(12, phase)
    machine.restored(step)
    assert machine.parameters_at == step
    machine.advance(StepEvent.STEP_ENTERED)
    assert machine == StepMachine(step, Phase.FORWARD)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER])
def test_restored_inside_a_step_raises_and_changes_nothing(phase: Phase) -> None:
    machine = StepMachine(12, phase)
    with pytest.raises(LocalProtocolError):
        machine.restored(3)
    assert machine == StepMachine(12, phase)
