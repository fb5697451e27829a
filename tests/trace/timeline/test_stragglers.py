"""Who is marked as slow, and who is not."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.trace.timeline.pace import DURATION_DTYPE, DurationArray
from keepstep.trace.timeline.stragglers import MIN_STEPS, WINDOW, StragglerWatch

MS = 1_000_000


def durations(
    world_size: int, num_steps: int, slow: dict[tuple[int, Phase], float], seed: int = 0, noise: float = 0.05
) -> DurationArray:
    """Phases of 20 ms that differ by ``noise`` of it, with those of some ranks longer by a factor."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(num_steps):
        for rank in range(world_size):
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED):
                own_ns = round(20 * MS * slow.get((rank, phase), 1.0) * (1 + noise * rng.standard_normal()))
                rows.append((step, own_ns, own_ns, step, rank, rank, PHASES.index(phase)))
    return np.array(rows, DURATION_DTYPE)


def found(watch: StragglerWatch) -> list[tuple[int, str]]:
    return [(each.rank, each.phase) for each in watch.found()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_is_marked_where_all_are_alike(world_size: int, seed: int) -> None:
    watch = StragglerWatch(world_size)
    watch.take(durations(world_size, 100, {}, seed))
    assert watch.found() == []


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.UPDATED])
def test_who_is_slow_in_a_phase_is_marked(world_size: int, phase: Phase) -> None:
    watch = StragglerWatch(world_size)
    watch.take(durations(world_size, 40, {(1, phase): 1.6}))
    (straggler,) = watch.found()
    assert straggler.rank == 1
    assert straggler.phase == {Phase.UPDATED: "between steps"}.get(phase, str(phase))
    assert 1.4 < straggler.ratio < 1.8
    assert abs(straggler.typical_ms - 20) < 2


def test_who_waits_is_not_marked() -> None:
    watch = StragglerWatch(4)
    watch.take(durations(4, 40, {(2, Phase.SYNCED): 10.0}))
    assert watch.found() == []


def test_the_worst_comes_first() -> None:
    watch = StragglerWatch(16)
    watch.take(durations(16, 40, {(3, Phase.FORWARD): 1.5, (9, Phase.BACKWARD): 3.0}))
    assert found(watch) == [(9, "backward"), (3, "forward")]


def test_a_few_slow_steps_are_no_straggler() -> None:
    watch = StragglerWatch(4)
    watch.take(durations(4, WINDOW, {}))
    watch.take(durations(4, WINDOW // 4, {(1, Phase.FORWARD): 5.0}))
    assert watch.found() == []


def test_who_becomes_fast_again_is_not_marked_any_more() -> None:
    watch = StragglerWatch(4)
    watch.take(durations(4, WINDOW, {(1, Phase.FORWARD): 2.0}))
    assert found(watch) == [(1, "forward")]
    watch.take(durations(4, WINDOW, {}))
    assert watch.found() == []


def test_too_few_steps_say_nothing() -> None:
    watch = StragglerWatch(4)
    watch.take(durations(4, MIN_STEPS - 1, {(1, Phase.FORWARD): 2.0}))
    assert watch.found() == []


def test_a_replacement_is_not_blamed_for_its_predecessor() -> None:
    watch = StragglerWatch(4)
    watch.take(durations(4, WINDOW, {(1, Phase.FORWARD): 2.0}))
    later = durations(4, MIN_STEPS, {})
    later["worker"][later["rank"] == 1] = 7
    watch.take(later)
    assert watch.found() == []


@pytest.mark.parametrize(("spread", "expected"), [(0.0, [(1, "forward")]), (0.1, [])])
def test_where_ranks_differ_anyway_one_has_to_stand_out_more(spread: float, expected: list[tuple[int, str]]) -> None:
    """A rank at 1.4 times what is typical is marked where the others are alike, and not where they differ as well."""
    others = {(rank, Phase.FORWARD): 1 + spread * (rank - 4) for rank in range(8)}
    watch = StragglerWatch(8)
    watch.take(durations(8, WINDOW, others | {(1, Phase.FORWARD): 1.4}))
    assert found(watch) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.15, []), (0.5, [(1, "between steps")])])
def test_a_slow_phase_that_delays_no_other_rank_is_not_marked(factor: float, expected: list[tuple[int, str]]) -> None:
    """All take a millisecond between two steps; a rank that takes three of 61 is no straggler, with ten it is."""
    others = {(rank, Phase.UPDATED): 0.05 for rank in range(8)}
    watch = StragglerWatch(8)
    watch.take(durations(8, WINDOW, others | {(1, Phase.UPDATED): factor}))
    assert found(watch) == expected


def test_pieces_of_any_size_come_to_the_same() -> None:
    whole, pieces = StragglerWatch(5), StragglerWatch(5)
    everything = durations(5, 75, {(4, Phase.BACKWARD): 1.5})
    whole.take(everything)
    for piece in np.array_split(everything, 31):
        pieces.take(piece)
    assert np.array_equal(whole._own_ns, pieces._own_ns, equal_nan=True)
    assert whole.found() == pieces.found() != []
