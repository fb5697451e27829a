"""When a rank takes snapshots, and what it keeps of them."""

from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.messages import Member, Membership
from keepstep.protocol.snapshots import (
    NUM_TRIALS,
    SHARE,
    SnapshotSchedule,
    fewest_steps,
    outdated,
    slot_for,
)

LONE = Membership.of(Member(rank, "n", str(rank)) for rank in range(2))
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


def test_auto_measures_in_the_first_steps_of_each_generation() -> None:
    schedule = SnapshotSchedule(None)
    for first in (0, 41):
        schedule.resumed(first, LONE)
        trials = range(first, first + NUM_TRIALS)
        assert due(schedule, trials) == list(trials)
        assert [step for step in range(first, first + 20) if schedule.is_agreed_in(step)] == [trials[-1]]
        schedule.agreed(5)
        assert not any(schedule.is_agreed_in(step) for step in range(first, first + 20))
        assert due(schedule, range(first + NUM_TRIALS, first + 12)) == [first + 5, first + 10]


@given(st.floats(0.0, 100.0), st.floats(1e-6, 100.0))
def test_the_cost_stays_within_its_share(cost_s: float, step_s: float) -> None:
    every = fewest_steps(cost_s, step_s)
    assert every >= 1
    assert cost_s <= SHARE * step_s * every * (1 + 1e-9)
    assert every == 1 or cost_s > SHARE * step_s * (every - 1) * (1 - 1e-9)


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12))
def test_the_snapshot_that_all_have_is_never_written_over(every: int, moves: list[tuple[bool, int]]) -> None:
    """A rank that has passed the barrier of step s leaves that of s alone until the next one is complete."""
    schedule, slots, step = SnapshotSchedule(every), dict[int, int](), 0
    schedule.resumed(0, LONE)
    newest = None
    for goes_back, length in [*moves, (False, 3)]:
        if goes_back and newest is not None:
            step = newest
            for slot in outdated(slots, step):
                del slots[slot]
            schedule.resumed(step, LONE)
        for _ in range(length):
            if schedule.is_due(step) and step not in slots.values():
                slot = slot_for(slots, 2)
                assert newest is None or slots.get(slot) != newest
                slots[slot] = step
            if schedule.is_due(step):
                newest = step
            step += 1
