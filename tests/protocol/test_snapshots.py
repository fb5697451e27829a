"""When a rank takes snapshots, and what it keeps of them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.messages import Member, Membership
from keepstep.protocol.snapshots import (
    NUM_TRIALS,
    SHARE,
    TRIAL_EVERY,
    SnapshotSchedule,
    buddies,
    buddy_and_wards,
    fewest_steps,
    lone_shards,
    outdated,
    slot_to_replace,
)

LONE = Membership.of(Member(rank, "n", str(rank)) for rank in range(2))
LONE_ON_TWO_NODES = Membership.of(Member(rank, f"n{rank}", str(rank)) for rank in range(2))
REPLICAS = Membership.of(Member(rank, "n", "0") for rank in range(2))


def due(schedule: SnapshotSchedule, steps: range) -> list[int]:
    return [step for step in steps if schedule.is_due(step)]


def test_all_count_from_the_step_at_which_they_resumed() -> None:
    schedule = SnapshotSchedule(3)
    schedule.resumed(0, LONE)
    assert due(schedule, range(8)) == [0, 3, 6]
    schedule.resumed(5, LONE)
    assert due(schedule, range(5, 12)) == [5, 8, 11]
    schedule.resumed(7, REPLICAS)
    assert due(schedule, range(7, 12)) == [7, 10], "asked for by number they are taken in any case"


def test_a_step_from_which_the_loop_cannot_go_back_has_the_snapshot_of_the_next_one() -> None:
    """Every tenth step is of that kind, and so is the one before it."""
    schedule = SnapshotSchedule(5)
    schedule.ahead = lambda step: step % 10 in (0, 9)
    schedule.resumed(0, LONE_ON_TWO_NODES)
    assert due(schedule, range(21)) == [0, 5, 15], "the first is there for ranks that have none yet"
    assert [step for step in range(21) if schedule.is_next_due(step)] == [0, 9, 10, 19, 20]
    assert [step for step in range(21) if schedule.is_second_copy_due(step)] == [0, 4, 8, 9, 14, 18, 19]
    off = SnapshotSchedule(0)
    off.ahead = schedule.ahead
    off.resumed(0, LONE)
    assert not any(off.is_next_due(step) or off.is_second_copy_due(step) for step in range(21))


def test_off() -> None:
    schedule = SnapshotSchedule(0)
    schedule.resumed(0, LONE)
    assert due(schedule, range(9)) == []
    assert not any(schedule.is_agreed_in(step) for step in range(9))


def test_auto_takes_none_where_every_shard_has_a_replica() -> None:
    schedule = SnapshotSchedule(None)
    schedule.resumed(0, REPLICAS)
    assert due(schedule, range(9)) == []
    assert not any(schedule.is_agreed_in(step) for step in range(9))


def agreed_in(schedule: SnapshotSchedule, steps: range) -> list[int]:
    return [step for step in steps if schedule.is_agreed_in(step)]


def test_auto_measures_in_the_first_steps_of_a_job() -> None:
    schedule = SnapshotSchedule(None)
    schedule.resumed(0, LONE)
    trials = range(NUM_TRIALS)
    assert due(schedule, trials) == list(trials)[::TRIAL_EVERY]
    assert agreed_in(schedule, range(2 * NUM_TRIALS)) == [0, trials[-1]]
    assert schedule.known == 0
    schedule.agreed(5)
    assert agreed_in(schedule, range(2 * NUM_TRIALS)) == []
    assert due(schedule, range(NUM_TRIALS, NUM_TRIALS + 10)) == [20, 25]


def test_auto_knows_from_the_first_step_on_what_was_agreed_before() -> None:
    schedule = SnapshotSchedule(None)
    schedule.resumed(0, LONE)
    schedule.agreed(5)
    schedule.resumed(41, LONE)
    assert schedule.known == 5
    assert agreed_in(schedule, range(41, 60)) == [41, 41 + NUM_TRIALS - 1], "a new process may not know it"
    schedule.agreed(7)  # another rank knew that
    assert agreed_in(schedule, range(41, 60)) == []
    assert due(schedule, range(42, 57)) == [48, 55]


def test_auto_measures_again_where_second_copies_begin_or_end() -> None:
    schedule = SnapshotSchedule(None)
    schedule.resumed(0, LONE)
    schedule.agreed(5)
    schedule.resumed(9, LONE_ON_TWO_NODES)
    assert schedule.known == 0


@given(st.floats(0.0, 100.0), st.floats(1e-6, 100.0))
def test_the_cost_stays_within_its_share(cost_s: float, step_s: float) -> None:
    every = fewest_steps(cost_s, step_s)
    assert every >= 1
    assert cost_s <= SHARE * step_s * every * (1 + 1e-9)
    assert every == 1 or cost_s > SHARE * step_s * (every - 1) * (1 - 1e-9)


def place(*nodes: str, shards: str = "") -> Membership:
    """Rank after rank, its node, or node.domain, and its shard; without any, each has one of its own."""
    members = []
    for rank, node in enumerate(nodes):
        name, _, domain = node.partition(".")
        members.append(Member(rank, name, shards[rank] if shards else str(rank), domain))
    return Membership.of(members)


@pytest.mark.parametrize(
    ("membership", "lone"),
    [
        (place("a", "a"), {"0", "1"}),
        (place("a", "a", shards="xx"), set()),
        (place("a", "b", shards="xx"), set()),
        (place("a", "a", "b", "b", shards="xyxy"), set()),
        (place("a", "a", "b", "b", shards="xxyy"), {"x", "y"}),
        (place("a.r", "b.r", "c.s", "d.s", shards="xxyy"), {"x", "y"}),
        (place("a.r", "b.r", shards="xx"), set()),
        (place("a", "b"), {"0", "1"}),
    ],
)
def test_shards_are_lone_whose_holders_fail_together(membership: Membership, lone: set[str]) -> None:
    assert lone_shards(membership) == lone


def test_there_are_no_buddies_on_one_node_or_where_there_are_replicas() -> None:
    assert buddies(place("a", "a")) == {}
    assert buddies(place("a", "a", "b", "b", shards="xyxy")) == {}
    assert buddies(place("a", "a", "b", "b", shards="xxyz")) == {0: 2, 1: 3, 2: 0, 3: 1}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=9),
    st.randoms(use_true_random=False),
)
def test_a_buddy_is_on_another_node_and_in_another_domain_where_that_can_be(
    nodes: list[tuple[int, int]], random: random.Random
) -> None:
    listed = [f"n{number}.d{domain}" for number, (ranks, domain) in enumerate(nodes) for _ in range(ranks)]
    random.shuffle(listed)
    membership = place(*listed)
    found = buddies(membership)
    assert set(found) == set(range(len(listed)))
    largest = max(Counter(domain for _, domain in nodes).values())
    for rank, buddy in found.items():
        own, other = membership.member(rank), membership.member(buddy)
        assert own.node != other.node
        assert own.domain != other.domain or 2 * largest > len(nodes)
    if len({ranks for ranks, _ in nodes}) == 1:
        assert sorted(found.values()) == sorted(found), "each has one ward where the nodes are equal"


def test_wards_are_the_ranks_whose_buddy_a_rank_is() -> None:
    membership = place("a", "b", "c")
    assert [buddy_and_wards(membership, rank) for rank in range(3)] == [(1, (2,)), (2, (0,)), (0, (1,))]
    assert buddy_and_wards(place("a", "b", "b"), 0) == (1, (1, 2))
    assert buddy_and_wards(place("a", "b", "b"), 2) == (0, ())
    assert buddy_and_wards(place("a", "a"), 0) == (None, ())


def test_second_copies_have_time_until_the_step_before_the_next_snapshot() -> None:
    schedule = SnapshotSchedule(3)
    schedule.resumed(5, LONE)
    assert [step for step in range(5, 15) if schedule.is_second_copy_due(step)] == [5, 7, 10, 13]
    schedule = SnapshotSchedule(0)
    schedule.resumed(5, LONE)
    assert not any(schedule.is_second_copy_due(step) for step in range(5, 15))


def test_a_new_snapshot_takes_the_place_of_its_ranks_older_one() -> None:
    held = {0: (7, 3), 1: (4, 9), 2: (7, 6)}
    assert slot_to_replace(held, 7, None) == 0
    assert slot_to_replace(held, 7, 3) == 2, "that of step 3 must stay"
    assert slot_to_replace(held, 7, 5) == 0
    assert slot_to_replace(held, 4, None) is None, "there is one of it only"
    assert slot_to_replace({}, 4, 3) is None


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12))
def test_the_snapshot_that_all_have_is_never_written_over(every: int, moves: list[tuple[bool, int]]) -> None:
    """A rank that has passed the barrier of step s leaves that of s alone until the next one is complete."""
    schedule, held, step = SnapshotSchedule(every), dict[int, tuple[int, int]](), 0
    schedule.resumed(0, LONE)
    newest = None
    for goes_back, length in [*moves, (False, 3)]:
        if goes_back and newest is not None:
            step = newest
            for slot in outdated(held, step):
                del held[slot]
            schedule.resumed(step, LONE)
        for _ in range(length):
            if schedule.is_due(step) and (0, step) not in held.values():
                slot = slot_to_replace(held, 0, None)
                slot = len(held) if slot is None else slot
                assert newest is None or held.get(slot) != (0, newest)
                held[slot] = (0, step)
            if schedule.is_due(step):
                newest = step
            step += 1
