"""One sentence on ranks that wait: tables of situations."""

from __future__ import annotations

import dataclasses

import pytest

from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.explanation import MAX_PARTS, RankState, explain, uneven
from keepstep.protocol.waiting.operations import (
    ALL_MEMBERS,
    ANY_MEMBER,
    Operation,
    OperationCount,
    Standing,
    WaitsFor,
)

NOW_S, SINCE_S = 100.0, 70.0


def count(
    group: str, operation: Operation, entered: int, left: int | None = None, peer: int = ALL_MEMBERS
) -> OperationCount:
    return OperationCount(group, operation, peer, entered, entered - 1 if left is None else left)


def through(group: str, entered: int) -> OperationCount:
    """A group with nothing in flight."""
    return count(group, Operation.ALL_REDUCE, entered, entered)


def waits(rank: int, *counts: OperationCount, step: int = 11, phase: Phase = Phase.BACKWARD) -> RankState:
    return RankState(rank, Standing(rank, step, phase, WaitsFor.RANKS, 30.0, counts, ""), SINCE_S)


def computes(
    rank: int, *counts: OperationCount, step: int = 12, phase: Phase = Phase.FORWARD, doing: str = ""
) -> RankState:
    return RankState(rank, Standing(rank, step, phase, WaitsFor.NOTHING, 30.0, counts, doing), SINCE_S)


def reads_nobody(rank: int) -> RankState:
    return RankState(rank, Standing(rank, 12, Phase.FORWARD, WaitsFor.READER, 30.0, (), ""), SINCE_S)


def ended(rank: int, steps: int) -> RankState:
    standing = Standing(rank, steps - 1, Phase.UPDATED, WaitsFor.CONTROLLER, 30.0, (), "")
    return RankState(rank, standing, SINCE_S, finished_at=steps)


def moves(rank: int) -> RankState:
    return RankState(rank)


GATHER, REDUCE, BARRIER = Operation.ALL_GATHER, Operation.ALL_REDUCE, Operation.BARRIER
SITUATIONS: dict[str, tuple[list[RankState], str | None]] = {
    "two groups": (
        [
            waits(0, count("world", GATHER, 412), through("0-1.0", 2)),
            waits(1, count("0-1.0", BARRIER, 3), through("world", 411)),
            waits(2, count("world", GATHER, 412)),
        ],
        "ranks 0 and 2 have been in all_gather #412 of world for 30 s (backward of step 11); rank 1 has been in "
        "barrier #3 of group 0-1.0 for 30 s (backward of step 11); ranks 0 and 2 have entered 412 collectives of "
        "world, rank 1 has entered 411; rank 1 has entered 3 collectives of group 0-1.0, rank 0 has entered 2",
    ),
    "another collective of the same group": (
        [waits(0, count("world", GATHER, 5)), waits(1, count("world", BARRIER, 5))],
        "rank 0 has been in all_gather #5 of world for 30 s (backward of step 11); rank 1 has been in barrier #5 of "
        "world for 30 s (backward of step 11); collective #5 of world is not the same everywhere: rank 0 in "
        "all_gather, rank 1 in barrier",
    ),
    "one rank computes": (
        [waits(0, count("world", REDUCE, 40, 37)), waits(1, count("world", REDUCE, 40, 37)), computes(3)],
        "ranks 0 and 1 have been in all_reduce #38 to #40 of world for 30 s (backward of step 11); rank 3 has computed "
        "for 30 s (forward of step 12, in no collective)",
    ),
    "the gradient barrier": (
        [waits(rank, count("world", BARRIER, 9), phase=Phase.SYNCED) for rank in (0, 1, 2)] + [moves(3)],
        "ranks 0 to 2 have been in the gradient barrier of step 11 for 30 s; rank 3 has moved lately",
    ),
    "output that nobody reads": (
        [reads_nobody(0), reads_nobody(1)],
        "ranks 0 and 1 have waited for somebody to read their output for 30 s (forward of step 12)",
    ),
    "what a process does": (
        [computes(0, doing="in load() at data.py:17"), waits(1, count("world", REDUCE, 9)), computes(2)],
        "ranks 0 and 2 have computed for 30 s (forward of step 12, in no collective), rank 0 in load() at data.py:17; "
        "rank 1 has been in all_reduce #9 of world for 30 s (backward of step 11)",
    ),
    "a silent node": (
        [waits(0, count("world", BARRIER, 9), phase=Phase.SYNCED)] + [RankState(n, heard_s=98.2) for n in (1, 2)],
        "rank 0 has been in the gradient barrier of step 11 for 30 s; ranks 1 and 2 have moved by the last report of "
        "their node, 1.8 s ago",
    ),
    "between steps": (
        [computes(0, step=7, phase=Phase.UPDATED), waits(1, count("world", REDUCE, 9), step=7, phase=Phase.UPDATED)],
        "rank 0 has computed for 30 s (after step 7, in no collective); rank 1 has been in all_reduce #9 of world for "
        "30 s (after step 7)",
    ),
    "before the first step": (
        [
            waits(0, count("world", REDUCE, 1), step=0, phase=Phase.STARTING),
            computes(1, step=-1, phase=Phase.UPDATED),
        ],
        "rank 0 has been in all_reduce #1 of world for 30 s (before the first step); rank 1 has computed for 30 s "
        "(before the first step, in no collective)",
    ),
    "messages between two": (
        [
            waits(0, count("world", Operation.RECV, 4, peer=2)),
            waits(1, count("1-7.0", Operation.SEND, 2, peer=1)),
            waits(2, count("2-3-4-5~0011aabb", Operation.RECV, 1, peer=1)),
            waits(3, count("world", Operation.RECV, 1, peer=ANY_MEMBER)),
        ],
        "rank 0 has been in recv #4 from rank 2 in world for 30 s (backward of step 11); rank 1 has been in send #2 to "
        "rank 7 in group 1-7.0 for 30 s (backward of step 11); rank 2 has been in recv #1 from rank 1 of its members "
        "in group 2-3-4-5~0011aabb for 30 s (backward of step 11); rank 3 has been in recv #1 from any rank in world "
        "for 30 s (backward of step 11)",
    ),
    "a loop that ended": (
        [ended(0, 10), waits(1, count("world", REDUCE, 31), step=10)],
        "rank 0 has ended its loop after 10 steps; rank 1 has been in all_reduce #31 of world for 30 s (backward of "
        "step 10)",
    ),
    "a page that could not be read": (
        [waits(0), waits(1)],
        "ranks 0 and 1 have been in a collective for 30 s (backward of step 11)",
    ),
    "nothing waits": ([computes(0), moves(1)], None),
    "all have ended": ([ended(0, 10), ended(1, 10)], None),
    "no ranks": ([], None),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_is_explained(name: str) -> None:
    ranks, expected = SITUATIONS[name]
    assert explain(ranks, NOW_S) == expected


def test_equal_situations_have_equal_sentences_when_durations_are_left_out() -> None:
    earlier = [waits(0, count("world", GATHER, 5)), computes(1)]
    later = [dataclasses.replace(state, since_s=state.since_s - 40.0) for state in earlier]
    assert explain(earlier, None) == explain(later, None)
    assert explain(earlier, NOW_S) != explain(later, NOW_S)
    assert explain(earlier, None) == (
        "rank 0 has been in all_gather #5 of world (backward of step 11); rank 1 has computed (forward of step 12, in "
        "no collective)"
    )


def test_a_thousand_ranks_are_reported_by_ranges() -> None:
    ranks = [waits(rank, count("world", REDUCE, 7)) for rank in range(1000) if rank not in (4, 600, 601)]
    text = explain([*ranks, computes(4), moves(600), moves(601)], NOW_S)
    assert text is not None
    assert text.startswith("ranks 0 to 3, 5 to 599 and 602 to 999 have been in all_reduce #7 of world for 30 s")


def test_a_thousand_places_are_not_all_told() -> None:
    text = explain([waits(rank, count("world", REDUCE, 7 + rank)) for rank in range(1000)], NOW_S)
    assert text is not None
    assert f"; {1000 - MAX_PARTS} other places are left out; " in text
    assert len(text) < 4000


def test_short_waits_are_reported_with_a_tenth_of_a_second() -> None:
    assert " for 1.2 s " in str(explain([waits(0)], SINCE_S + 1.23))
    assert " for 0.0 s " in str(explain([waits(0)], SINCE_S - 5.0)), "clocks may differ a little"


# ---- uneven steps ---------------------------------------------------------------------------------------------------


def begun(rank: int, step: int, phase: Phase) -> RankState:
    return waits(rank, step=step, phase=phase)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER])
def test_a_rank_in_a_step_behind_the_end_of_another_ranks_loop_can_never_complete_it(phase: Phase) -> None:
    assert uneven([ended(0, 10), begun(1, 10, phase), begun(2, 10, phase)]) == (
        "rank 0 ended its loop after 10 steps, and ranks 1 and 2 are in step 10, which all ranks have to take part in: "
        "give session.steps() the same number on every rank, and leave the loop at the same step"
    )
    assert uneven([ended(0, 10), ended(2, 10), computes(1, step=10, phase=phase)]) is not None


HEALTHY = {
    "the same last step": [ended(0, 10), begun(1, 9, Phase.SYNCED), begun(2, 9, Phase.OPTIMIZER)],
    "behind the last step": [ended(0, 10), computes(1, step=9, phase=Phase.UPDATED)],
    "not at its first step yet": [ended(0, 10), computes(1, step=0, phase=Phase.STARTING)],
    "it moves": [ended(0, 10), moves(1)],
    "all have ended": [ended(0, 10), ended(1, 10)],
    "none has": [begun(0, 10, Phase.SYNCED), begun(1, 9, Phase.SYNCED)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_can_still_complete_is_not_uneven(name: str) -> None:
    assert uneven(HEALTHY[name]) is None
