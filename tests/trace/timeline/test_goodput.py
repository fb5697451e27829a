"""The share of time that went into steps that count, of recoveries whose times are round numbers."""

from __future__ import annotations

import pytest

from keepstep.protocol.recovery.records import Failure, RecoveryRecord
from keepstep.trace.timeline.goodput import Ledger
from keepstep.trace.timeline.pace import Pace
from keepstep.trace.timeline.scene import Scene


def scene(
    since_s: float, begun_s: float, resumed_s: float | None = None, *, generation: int = 2, resume: int = 7
) -> Scene:
    """A recovery from a failure in step 7, whose first step afterwards took a second."""
    failure = Failure(1, "signal", "", 7, "backward", since_s)
    record = RecoveryRecord(generation, "signal", "rank 1 lost", begun_s, [failure])
    record.resumed_s, record.first_step_s, record.resume_step = resumed_s, 1.0, resume
    return Scene(1, record, {}, {}, told_s=[begun_s], has_resumed=resumed_s is not None)


def pace() -> Pace:
    """Training began at 0; the first rank entered step 7 at 99 s."""
    return Pace(begun_ns={(1, 7): 99_000_000_000}, first_forward_ns=0)


def test_without_a_failure_nothing_is_lost() -> None:
    assert Ledger([], pace()).goodput(50.0) == 1.0


def test_before_training_there_is_no_goodput() -> None:
    assert Ledger([], Pace()).goodput(50.0) is None
    assert Ledger([], pace()).goodput(0.0) is None


def test_a_step_computed_for_nothing_is_lost_with_what_follows() -> None:
    ledger = Ledger([scene(100.0, 100.5, 104.0)], pace())
    assert ledger.lost(200.0) == [(99.0, 103.0)]
    assert ledger.goodput(200.0) == pytest.approx(1 - 4 / 200)


def test_where_no_step_was_lost_the_loss_begins_with_the_failure() -> None:
    assert Ledger([scene(100.0, 100.5, 104.0, resume=8)], pace()).lost(200.0) == [(100.0, 103.0)]


def test_where_no_record_has_the_beginning_of_the_step_the_loss_begins_with_the_failure() -> None:
    assert Ledger([scene(100.0, 100.5, 104.0)], Pace(first_forward_ns=0)).lost(200.0) == [(100.0, 103.0)]


def test_a_recovery_under_way_costs_until_now() -> None:
    ledger = Ledger([scene(100.0, 100.5, resume=8)], pace())
    assert [ledger.lost(now_s) for now_s in (110.0, 120.0)] == [[(100.0, 110.0)], [(100.0, 120.0)]]
    assert ledger.goodput(120.0) == pytest.approx(1 - 20 / 120)


def test_recoveries_that_follow_on_each_other_cost_once() -> None:
    first, second = scene(100.0, 100.5), scene(101.0, 101.5, 106.0, generation=3)
    first.overtaken_s = 101.5
    assert Ledger([first], pace()).lost(103.0) == [(99.0, 103.0)]
    assert Ledger([first, second], pace()).lost(200.0) == [(99.0, 105.0)]


def test_what_is_lost_is_remembered_when_the_pace_has_forgotten() -> None:
    scenes, known = [scene(100.0, 100.5, 104.0)], pace()
    ledger = Ledger(scenes, known)
    before = ledger.lost(150.0)
    known.begun_ns.clear()
    scenes.append(scene(160.0, 160.5, 163.0, generation=3, resume=8))
    assert ledger.lost(200.0) == [*before, (160.0, 162.0)]
    assert ledger.goodput(200.0) == pytest.approx(1 - 6 / 200)
    assert ledger.lost(200.0) == [*before, (160.0, 162.0)]
