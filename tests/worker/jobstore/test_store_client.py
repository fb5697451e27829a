"""A rank that waits on a key: where it may, and what a recovery that begins meanwhile does to its wait."""

import threading
from datetime import timedelta

import pytest
from tests.worker.jobstore.answering import Rank, later
from torch import distributed as dist

from keepstep.errors import PeerLost, StepInterrupted, UsageError
from keepstep.protocol.messages import SafePointReached
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.worker import WorkerState
from keepstep.worker import coordination

LONG = timedelta(seconds=60)
IN_STEP = (StepEvent.STEP_ENTERED,)
IN_UPDATE = (*IN_STEP, StepEvent.BACKWARD_BEGUN, StepEvent.GRADIENTS_SYNCED, StepEvent.BARRIER_LEFT)


@pytest.fixture
def rank() -> Rank:
    found = Rank()
    found.store.set_timeout(LONG)
    return found


def in_second_step(rank: Rank, *events: StepEvent) -> None:
    """Brings the rank into the second step of its process."""
    rank.advance(*IN_UPDATE)
    rank.coordination.complete_step()
    for event in (*IN_STEP, *events):
        rank.coordination.move(event)


@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "through torch's C++"])
def test_in_the_first_step_it_is_interrupted_like_a_collective(rank: Rank, wrapped: bool) -> None:
    rank.advance(*IN_STEP)
    store = dist.PrefixStore("p", rank.store) if wrapped else rank.store
    later(rank, rank.stop)
    with pytest.raises(StepInterrupted):
        store.get("of a lost rank")
    rank.store.set("key", b"1")  # what does not wait is carried out
    with pytest.raises(StepInterrupted):
        store.wait(["of a lost rank"])  # the failure is known by now


def test_between_two_steps_it_waits_on_for_what_another_rank_sets(rank: Rank) -> None:
    rank.advance()
    later(rank, rank.stop, lambda: rank.coordination.knows_failure(60), lambda: rank.set_by_another("late", b"1"))
    assert rank.store.get("late") == b"1"
    assert rank.coordination.interrupted


def test_between_two_steps_it_ends_where_no_rank_will_set_the_key(rank: Rank) -> None:
    rank.advance()
    later(rank, rank.stop, rank.settle)
    with pytest.raises(dist.DistStoreError, match=r"none will set 'of a lost rank'.* exchange it with a collective"):
        rank.store.get("of a lost rank")
    assert rank.coordination.machine.own_reach() == (0,)


def test_after_the_update_of_a_step_it_waits_on_and_ends_likewise(rank: Rank) -> None:
    rank.advance(*IN_UPDATE)
    assert rank.coordination.phase is Phase.OPTIMIZER
    later(rank, rank.stop, lambda: rank.set_by_another("late", b"1"))
    assert rank.store.get("late") == b"1"
    rank.waits.clear()
    later(rank, rank.settle)
    with pytest.raises(dist.DistStoreError, match="none will set 'of a lost rank'"):
        rank.store.get("of a lost rank")
    rank.coordination.complete_step()
    assert rank.coordination.machine.own_reach() == (1,), "its copy is whole"


@pytest.mark.parametrize("events", [(), IN_UPDATE[1:]], ids=["before the update", "after the update"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "through torch's C++"])
def test_in_a_later_step_it_is_refused(rank: Rank, wrapped: bool, events: tuple[StepEvent, ...]) -> None:
    store = dist.PrefixStore("p", rank.store) if wrapped else rank.store
    store.set("there", b"1")
    in_second_step(rank, *events)
    expected = (
        r"step 1: no rank has set key '(p/)?missing' of the store, .*a collective \(broadcast_object_list.* check\(\)"
    )
    with pytest.raises(UsageError, match=expected):
        store.get("missing")
    with pytest.raises(UsageError, match=expected):
        store.wait(["there", "missing"])
    assert not rank.waits.is_set()
    store.wait(["there"])
    assert store.get("there") == b"1"
    assert not store.check(["missing"])
    assert store.add("counter", 2) == 2
    assert store.compare_set("missing", "", "now") == b"now"
    assert store.delete_key("missing")


def test_between_two_later_steps_it_waits(rank: Rank) -> None:
    rank.advance(*IN_UPDATE)
    rank.coordination.complete_step()
    later(rank, lambda: rank.set_by_another("late", b"1"))
    assert rank.store.get("late") == b"1"


def test_in_a_later_step_what_a_failure_has_kept_others_from_setting_interrupts_it(rank: Rank) -> None:
    """As behind a barrier that was cut off, which the other rank would have entered when it had set the key."""
    in_second_step(rank)
    rank.stop()
    assert rank.coordination.knows_failure(60)
    with pytest.raises(StepInterrupted):
        rank.store.get("of a lost rank")


def test_another_thread_waits_on_wherever_the_training_thread_is(rank: Rank) -> None:
    in_second_step(rank)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(rank.store.get("late")))
    thread.start()
    assert rank.waits.wait(60)
    rank.stop()
    assert rank.coordination.knows_failure(60)
    rank.settle()
    rank.set_by_another("late", b"1")
    thread.join(60)
    assert found == [b"1"]


def test_what_another_thread_asks_meanwhile_does_not_keep_a_step_from_being_interrupted(rank: Rank) -> None:
    rank.advance(*IN_STEP)
    later(rank, lambda: rank.store.set("key", b"1"), rank.stop)
    with pytest.raises(StepInterrupted):
        rank.store.get("of a lost rank")


def test_before_the_first_step_it_stands_until_its_process_is_ended(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks restart. Here the controller does not end the process, and the deadline for that is short."""
    monkeypatch.setattr(coordination, "ORDER_DEADLINE_S", 0.1)
    machine = rank.coordination.machine
    machine.state, machine.generation = WorkerState.BUILDING, 1
    later(rank, rank.stop)
    with pytest.raises(PeerLost, match="no order from the controller within"):
        rank.store.get("of a lost rank")
    assert [type(report).__name__ for report in rank.said] == ["WorkerReady", "SafePointReached"]
    assert isinstance(rank.said[1], SafePointReached)
    assert rank.said[1].reach == ()
