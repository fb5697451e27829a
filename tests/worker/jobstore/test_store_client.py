"""A rank that waits on a key while a recovery begins, wherever in its script it waits."""

import threading
from datetime import timedelta

import pytest
from tests.worker.jobstore.answering import Rank, later
from torch import distributed as dist

from keepstep.errors import PeerLost, StepInterrupted
from keepstep.protocol.messages import Resume, SafePointReached, Stop
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.worker import WorkerState
from keepstep.worker import coordination
from keepstep.worker.jobstore.store_client import Downtime

LONG = timedelta(seconds=60)
IN_STEP = (StepEvent.STEP_ENTERED,)
IN_UPDATE = (*IN_STEP, StepEvent.BACKWARD_BEGUN, StepEvent.GRADIENTS_SYNCED, StepEvent.BARRIER_LEFT)


@pytest.fixture
def rank() -> Rank:
    found = Rank()
    found.store.set_timeout(LONG)
    return found


@pytest.mark.parametrize("wrapped", [False, True], ids=["by itself", "through torch's C++"])
def test_in_a_step_it_is_interrupted_like_a_collective(rank: Rank, wrapped: bool) -> None:
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
    with pytest.raises(dist.DistStoreError, match=r"none will set 'of a lost rank'.* inside of the step"):
        rank.store.get("of a lost rank")
    assert rank.coordination.machine.own_reach() == (0,)


def test_after_the_update_of_a_step_it_waits_on_and_at_last_is_restored_from_another_rank(rank: Rank) -> None:
    rank.advance(*IN_UPDATE)
    assert rank.coordination.phase is Phase.OPTIMIZER
    later(rank, rank.stop, lambda: rank.set_by_another("late", b"1"))
    assert rank.store.get("late") == b"1"
    rank.waits.clear()
    later(rank, rank.settle)
    with pytest.raises(StepInterrupted):
        rank.store.get("of a lost rank")
    assert rank.coordination.machine.own_reach() == ()


def test_another_thread_waits_on_wherever_the_training_thread_is(rank: Rank) -> None:
    rank.advance(*IN_STEP)
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


def test_time_in_a_recovery_does_not_count() -> None:
    downtime = Downtime()
    downtime.follow(Resume(1), 5.0)
    assert downtime.until(10.0) == 0.0
    downtime.follow(Stop(2, "", None), 10.0)
    downtime.follow(Stop(3, "", None), 11.0)
    assert downtime.until(12.0) == 2.0
    downtime.follow(Resume(3), 14.0)
    assert downtime.until(20.0) == 4.0


def test_a_deadline_that_passes_in_a_recovery_is_put_off_until_its_end(rank: Rank) -> None:
    rank.advance()
    later(rank, lambda: rank.order(Resume(2)))
    rank.stop()
    assert rank.coordination.knows_failure(60)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.001 s"):
        rank.store.wait(["never"], timedelta(milliseconds=1))
    assert rank.coordination.machine._resumed == 2, "it has waited for the end of the recovery"
