"""When an agent tells that ranks stand still, and when not again."""

from __future__ import annotations

import math

import msgspec

from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation, OperationCount, Standing, WaitsFor
from keepstep.protocol.waiting.watch import BEFORE, READ_SHARE, REPEAT_S, StandingWatch

EXPLAIN_S = 30.0
BIT_S = 0.001


def standing(worker: int, still_s: float = EXPLAIN_S, entered: int = 5) -> Standing:
    counts = (OperationCount("world", Operation.BARRIER, ALL_MEMBERS, entered, entered - 1),)
    return Standing(worker, 3, Phase.UPDATED, WaitsFor.RANKS, still_s, counts, "")


def test_nothing_is_due_before_a_rank_has_stood_still_for_long() -> None:
    watch = StandingWatch(EXPLAIN_S)
    assert not watch.is_due({}, 100.0)
    assert not watch.is_due({0: EXPLAIN_S - BIT_S, 1: 0.0}, 100.0)
    assert watch.is_due({0: EXPLAIN_S, 1: 0.0}, 100.0)


def test_what_is_found_is_reported_and_looked_at_again_but_told_again_only_when_it_changed() -> None:
    watch = StandingWatch(EXPLAIN_S)
    assert watch.news([standing(0)], 100.0) == (standing(0),)
    assert not watch.is_due({0: EXPLAIN_S + 4.9}, 100.0 + EXPLAIN_S * READ_SHARE - BIT_S)
    assert watch.is_due({0: EXPLAIN_S + 5.0}, 100.0 + EXPLAIN_S * READ_SHARE)
    assert watch.news([standing(0, 35.0)], 105.0) is None, "it stands where it stood"
    told = msgspec.structs.replace(standing(0, 35.0), doing="uses 3% of a core")
    assert watch.news([told], 105.0) is None, "what its process does is no news"
    assert watch.news([standing(0, 40.0), standing(1)], 110.0) == (standing(0, 40.0), standing(1))
    assert watch.news([standing(0, 45.0, entered=6), standing(1)], 115.0) is not None


def test_what_does_not_change_is_reported_again_after_minutes() -> None:
    watch = StandingWatch(EXPLAIN_S)
    watch.news([standing(0)], 100.0)
    assert watch.news([standing(0, 300.0)], 100.0 + REPEAT_S - BIT_S) is None
    assert watch.news([standing(0, 301.0)], 100.0 + REPEAT_S) is not None
    assert watch.news([standing(0, 400.0)], 110.0 + REPEAT_S) is None


def test_it_is_taken_back_as_soon_as_one_of_them_has_moved() -> None:
    watch = StandingWatch(EXPLAIN_S)
    watch.news([standing(0), standing(1)], 100.0)
    assert not watch.is_due({0: EXPLAIN_S - 10.0, 1: EXPLAIN_S - 10.0}, 102.0)
    assert watch.is_due({0: 1.0, 1: EXPLAIN_S - 10.0}, 102.0)
    assert watch.news([], 102.0) == ()
    assert watch.news([], 103.0) is None
    assert not watch.is_due({0: 2.0}, 103.0)


def test_who_is_told_of_beside_the_one_that_stood_still_for_the_whole_time() -> None:
    watch = StandingWatch(EXPLAIN_S)
    assert watch.least_s(EXPLAIN_S, is_stalled=False) == EXPLAIN_S * BEFORE
    assert watch.least_s(EXPLAIN_S - BIT_S, is_stalled=False) == math.inf
    assert watch.least_s(1.0, is_stalled=True) == 0.0
