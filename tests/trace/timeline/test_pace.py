"""Durations, steps and rates, from phase changes in pieces of any size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import MOMENT_INDEX, PHASES, SnapshotMoment
from keepstep.trace.record.phaselog import NO_RANK, PHASE_DTYPE, PhaseArray
from keepstep.trace.timeline import pace
from keepstep.trace.timeline.pace import Durations, Pace, SnapshotPace

MS = 1_000_000
STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED)
TOOK_MS = dict(zip(STEP, (10, 20, 3, 5, 1), strict=True))
STEP_MS = sum(TOOK_MS.values())


def change(at_ms: float, phase: Phase, step: int, rank: int = 0, **more: int) -> PhaseArray:
    record = np.zeros(1, PHASE_DTYPE)
    record["at_ns"], record["phase"], record["step"] = round(at_ms * MS), PHASES.index(phase), step
    record["rank"], record["worker"], record["generation"] = rank, more.get("worker", rank), more.get("generation", 1)
    record["entered_ns"] = more.get("entered_ms", 0) * MS
    return record


def training(num_steps: int, rank: int = 0, from_ms: float = 1000.0, from_step: int = 0, **more: int) -> PhaseArray:
    found = []
    at_ms = from_ms
    for step in range(from_step, from_step + num_steps):
        for phase in STEP:
            found.append(change(at_ms, phase, step, rank, **more))
            at_ms += TOOK_MS[phase]
    return np.concatenate(found)


def cut(changes: PhaseArray, places: list[int]) -> list[PhaseArray]:
    return np.split(changes, sorted(place % (len(changes) + 1) for place in places))


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_durations_do_not_depend_on_how_changes_arrive(places: list[int]) -> None:
    both = np.concatenate([training(4, rank=0), training(4, rank=1, from_ms=1002)])
    both = both[np.argsort(both["at_ns"], kind="stable")]
    durations = Durations()
    found = np.concatenate([durations.take(piece) for piece in cut(both, places)])
    for rank in (0, 1):
        own = found[found["rank"] == rank]
        own = own[np.argsort(own["end_ns"], kind="stable")]
        assert [(PHASES[each["phase"]], each["step"]) for each in own] == [
            (phase, step) for step in range(4) for phase in STEP
        ][:-1]
        assert own["whole_ns"].tolist() == [TOOK_MS[PHASES[each["phase"]]] * MS for each in own]
        assert own["own_ns"].tolist() == own["whole_ns"].tolist()


def test_the_wait_at_the_end_of_a_backward_is_not_its_own() -> None:
    changes = np.concatenate(
        [
            change(0, Phase.FORWARD, 0),
            change(10, Phase.BACKWARD, 0),
            change(50, Phase.SYNCED, 0, entered_ms=30),
            change(60, Phase.OPTIMIZER, 0, entered_ms=51),
        ]
    )
    found = Durations().take(changes)
    assert found["whole_ns"].tolist() == [10 * MS, 40 * MS, 10 * MS]
    assert found["own_ns"].tolist() == [10 * MS, 20 * MS, 10 * MS]


def test_an_interrupted_phase_counts_for_nothing() -> None:
    changes = np.concatenate(
        [
            training(1),
            change(2000, Phase.FORWARD, 1),
            change(2010, Phase.BACKWARD, 1),
            change(2015, Phase.UPDATED, 0),  # undone
            change(2100, Phase.FORWARD, 1, generation=2),
            change(2110, Phase.BACKWARD, 1, generation=2),
        ]
    )
    found = Durations().take(changes)
    after = found[found["end_ns"] > 2000 * MS]
    assert [(PHASES[each["phase"]], each["step"], each["whole_ns"] // MS) for each in after] == [
        (Phase.FORWARD, 1, 10),
        (Phase.FORWARD, 1, 10),
    ]


def test_a_spare_has_no_durations() -> None:
    assert len(Durations().take(training(2, rank=NO_RANK, worker=4))) == 0


def test_a_rank_that_moves_to_another_worker_starts_over() -> None:
    changes = np.concatenate([training(1, rank=1, worker=1), training(1, rank=1, worker=5, from_ms=3000, from_step=1)])
    assert len(Durations().take(changes)) == 2 * (len(STEP) - 1)


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_steps_are_counted_once(places: list[int]) -> None:
    both = np.concatenate([training(50, rank=0), training(50, rank=1, from_ms=1001)])
    both = both[np.argsort(both["at_ns"], kind="stable")]
    found = Pace()
    for piece in cut(both, places):
        found.take(piece, 0)
    assert found.step == 50
    assert sum(found.buckets) == 50
    assert found.first_forward_ns == 1000 * MS
    assert found.begun_ns[1, 7] == round((1000 + 7 * STEP_MS) * MS)
    rate = found.steps_per_s(round((1000 + 50 * STEP_MS) * MS))
    assert rate is not None
    assert abs(rate - 1000 / STEP_MS) < 0.5


def test_a_step_that_is_computed_again_counts_once() -> None:
    found = Pace()
    found.take(training(3), 0)
    found.take(np.concatenate([change(2000, Phase.FORWARD, 3), change(2010, Phase.UPDATED, 2)]), 0)
    found.take(training(2, from_ms=3000, from_step=3, generation=2), 0)
    assert (found.step, sum(found.buckets)) == (5, 5)


def test_a_job_that_goes_on_from_a_checkpoint_has_not_done_what_was_before() -> None:
    found = Pace()
    found.take(training(2, from_step=1000), 0)
    assert (found.step, sum(found.buckets)) == (1002, 2)


def test_the_overview_stays_bounded(monkeypatch: object) -> None:
    found = Pace()
    second = 1_000_000_000
    for number in range(3 * pace.MAX_BUCKETS):
        found.take(change(number * 1000 + 1, Phase.UPDATED, number), 0)
    assert len(found.buckets) <= pace.MAX_BUCKETS
    assert sum(found.buckets) == 3 * pace.MAX_BUCKETS
    assert found.bucket_ns == 4 * second
    assert set(found.buckets) == {4}


def test_without_steps_there_is_no_rate() -> None:
    assert Pace().steps_per_s(10**9) is None
    one = Pace()
    one.take(training(1), 0)
    assert one.steps_per_s(10**10) is None


def test_a_job_that_stands_still_gets_slower() -> None:
    found = Pace()
    found.take(training(100), 0)
    end_ns = round((1000 + 100 * STEP_MS) * MS)
    rates = [found.steps_per_s(end_ns + later_s * 10**9) for later_s in (0, 20, 60)]
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0] > rates[1] > 0
    assert rates[2] is not None
    assert rates[2] < rates[1]


def moment(at_ms: float, kind: SnapshotMoment, step: int, rank: int) -> PhaseArray:
    record = change(at_ms, Phase.FORWARD, step, rank)
    record["phase"], record["entered_ns"] = MOMENT_INDEX[kind], 100 * (rank + 1)
    return record


def test_the_newest_snapshot_of_all_ranks_counts() -> None:
    found = SnapshotPace()
    found.take(moment(1, SnapshotMoment.BEGUN, 0, 0))
    assert (found.num_taken, found.newest(2), found.every) == (0, None, None)
    found.take(np.concatenate([moment(2 + step, SnapshotMoment.COMPLETE, step, 0) for step in (4, 0, 2)]))
    assert (found.newest(2), found.every) == (None, 2)
    found.take(moment(9, SnapshotMoment.COMPLETE, 2, 1))
    assert (found.newest(2), found.num_taken, found.num_bytes) == (2, 4, {0: 100, 1: 200})
    found.take(np.concatenate([moment(10, SnapshotMoment.LOADED, 2, rank) for rank in (0, 1)]))
    assert (found.steps, found.num_taken) == ({0: 2, 1: 2}, 4)
    found.take(moment(11, SnapshotMoment.COMPLETE, 3, NO_RANK))
    assert found.num_taken == 4


def test_a_rank_is_without_a_second_copy_until_one_is_complete() -> None:
    found = SnapshotPace()
    found.take(np.concatenate([moment(1 + rank, SnapshotMoment.REFUSED, 0, rank) for rank in (0, 1)]))
    found.take(moment(3, SnapshotMoment.REFUSED, 2, 1))
    assert (found.num_refused, found.undoubled) == (3, {0, 1})
    found.take(moment(4, SnapshotMoment.DOUBLED, 4, 1))
    assert (found.num_refused, found.undoubled) == (3, {0})
