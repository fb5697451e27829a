"""The fields of `WorkerMachine`: what its docstring says of them holds between all events of simulated jobs."""

from collections.abc import Callable

import pytest

from keepstep.protocol.messages import Hold, Holding
from keepstep.protocol.worker import WorkerMachine, WorkerState
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.run import case_of, run
from keepstep.sim.world import World

NUM_SEEDS = 60
TRAINS = (WorkerState.LOADING, WorkerState.RECOVERED, WorkerState.TRAINING)

Breach = Callable[[WorkerMachine], None]


def check(machine: WorkerMachine) -> None:
    """Asserts what must hold of the fields at one moment."""
    generation, stop, target = machine.generation, machine._stop_generation, machine._target
    order = machine._order.generation if machine._order is not None else None
    assert -1 <= machine._failed_generation <= generation <= target <= machine.target_generation
    assert 0 <= machine._completed <= machine._resumed <= generation
    assert 0 <= machine._reported <= max(stop, target)
    assert 0 <= machine._advanced <= stop
    assert order is None or order >= generation
    assert order == generation > 0 or machine.state not in TRAINS
    assert target > generation or machine.state is not WorkerState.CONNECTING
    assert machine._settling is None or machine._settling == stop > generation
    assert machine._unsent is None or machine._unsent is machine._hold
    assert machine._hold is None or machine._hold.generation <= generation
    assert machine.partially_updated or not machine.in_doubt
    if machine.state is WorkerState.TRAINING:
        assert machine._next_stop - machine.steps.step in (0, 1)


def counted(machine: WorkerMachine) -> tuple[int, ...]:
    """The fields that never fall."""
    return (
        *(machine.generation, machine._stop_generation, machine._failed_generation, machine._reported),
        *(machine._advanced, machine._resumed, machine._completed),
    )


def test_the_fields_of_every_worker_hold_between_all_events(monkeypatch: pytest.MonkeyPatch) -> None:
    happen, before = World.happen, dict[tuple[int, int], tuple[int, ...]]()
    num_checked = 0

    def checked(self: World, event: Event) -> None:
        nonlocal num_checked
        happen(self, event)
        for worker in self.workers.values():
            if worker.is_alive:
                check(worker.machine)
                now = counted(worker.machine)
                then = before.setdefault((id(self), worker.process), now)
                assert all(new >= old for new, old in zip(now, then, strict=True)), f"{worker}: {then}, then {now}"
                before[id(self), worker.process] = now
                num_checked += 1

    monkeypatch.setattr(World, "happen", checked)
    for seed in range(NUM_SEEDS):
        before.clear()
        outcome = run(case_of(seed))
        assert outcome.check is None, f"seed {seed}: {outcome.detail}"
    assert num_checked > 100 * NUM_SEEDS


def give_up_its_generation(machine: WorkerMachine) -> None:
    machine.generation = 0


def fail_in_a_generation_to_come(machine: WorkerMachine) -> None:
    machine._failed_generation = 9


def resume_a_generation_to_come(machine: WorkerMachine) -> None:
    machine._resumed = 9


def complete_what_was_never_resumed(machine: WorkerMachine) -> None:
    machine._completed = machine._resumed + 1


def report_for_a_generation_to_come(machine: WorkerMachine) -> None:
    machine._reported = 9


def advance_without_a_stop(machine: WorkerMachine) -> None:
    machine._advanced = 9


def lose_its_order(machine: WorkerMachine) -> None:
    machine._order = None


def connect_what_it_has_connected(machine: WorkerMachine) -> None:
    machine.state = WorkerState.CONNECTING


def settle_for_no_stop(machine: WorkerMachine) -> None:
    machine._settling = machine._stop_generation


def send_what_it_has_not_answered(machine: WorkerMachine) -> None:
    machine.receive(Hold(machine.generation))
    machine._unsent = Holding((0,), machine.generation, 99)


def doubt_a_whole_copy(machine: WorkerMachine) -> None:
    machine.in_doubt = True


def ask_two_steps_later(machine: WorkerMachine) -> None:
    machine._next_stop += 2


BREACHES: list[Breach] = [
    give_up_its_generation,
    fail_in_a_generation_to_come,
    resume_a_generation_to_come,
    complete_what_was_never_resumed,
    report_for_a_generation_to_come,
    advance_without_a_stop,
    lose_its_order,
    connect_what_it_has_connected,
    settle_for_no_stop,
    send_what_it_has_not_answered,
    doubt_a_whole_copy,
    ask_two_steps_later,
]


class _Trains(Exception):
    """A rank of a simulated job trains."""


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.__name__)
def test_each_breach_is_noticed(breach: Breach, monkeypatch: pytest.MonkeyPatch) -> None:
    happen, found = World.happen, list[WorkerMachine]()

    def until_one_trains(self: World, event: Event) -> None:
        happen(self, event)
        for worker in self.workers.values():
            if worker.machine.state is WorkerState.TRAINING:
                found.append(worker.machine)
                raise _Trains

    monkeypatch.setattr(World, "happen", until_one_trains)
    with pytest.raises(_Trains):
        run(case_of(0))
    (machine,) = found
    check(machine)
    breach(machine)
    with pytest.raises(AssertionError):
        check(machine)
