"""What is drawn of a recovery is what happened in it."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.trace.pictures.lanes import MAX_LANES, Stretch, board, merged, phase_stretches, without
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseArray
from keepstep.trace.timeline.run import Run

PAIRS = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1])))
KINDS = st.sampled_from(["forward", "backward", "optimizer"])


def disjoint(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that do not overlap an earlier one."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(pairs):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def covered(stretches: list[Stretch]) -> set[int]:
    """The whole seconds that lie in some stretches."""
    return {second for s in stretches for second in range(int(s.begin_s), int(s.end_s))}


@given(st.lists(PAIRS, max_size=8), st.lists(PAIRS, max_size=8).map(disjoint))
def test_without_some_times(pairs: list[tuple[float, float]], taken: list[tuple[float, float]]) -> None:
    whole = [Stretch("forward", *pair) for pair in pairs]
    busy = covered([Stretch("stop", *pair) for pair in taken])
    left = list(without(whole, taken))
    assert covered(left) == covered(whole) - busy
    assert all(stretch.end_s > stretch.begin_s for stretch in left)


@given(
    st.lists(PAIRS, max_size=8).map(disjoint).flatmap(lambda p: st.tuples(st.just(p), st.tuples(*(KINDS for _ in p)))),
    st.lists(PAIRS, max_size=5).map(disjoint),
)
def test_together_nothing_overlaps_and_nothing_is_lost(
    phases: tuple[list[tuple[float, float]], tuple[str, ...]], spans: list[tuple[float, float]]
) -> None:
    computed = [Stretch(kind, *pair) for pair, kind in zip(*phases, strict=True)]
    recovering = [Stretch("stop", *pair) for pair in spans]
    found = merged(computed, recovering)
    assert all(left.end_s <= right.begin_s for left, right in itertools.pairwise(found))
    assert covered(found) == covered([*computed, *recovering])
    updates = [s for s in computed if s.kind == "optimizer"]
    assert covered([s for s in found if s.kind == "optimizer"]) == covered(updates), "an update counts most"
    assert covered([s for s in found if s.kind == "stop"]) == covered(recovering) - covered(updates)


def changes(*records: tuple[float, Phase, int], entered_s: float = 0.0) -> PhaseArray:
    """Phase changes of one worker: (time, phase, step)."""
    found = np.zeros(len(records), PHASE_DTYPE)
    for record, (at_s, phase, step) in zip(found, records, strict=True):
        record["at_ns"], record["phase"], record["step"] = at_s * 1e9, PHASES.index(phase), step
        record["entered_ns"] = entered_s * 1e9
    return found


def test_phases_become_stretches() -> None:
    step = changes(
        (1.0, Phase.FORWARD, 4), (2.0, Phase.BACKWARD, 4), (4.0, Phase.SYNCED, 4), (4.5, Phase.OPTIMIZER, 4),
        (5.0, Phase.UPDATED, 4), (6.0, Phase.FORWARD, 5),
    )  # fmt: skip
    found = [(s.kind, s.begin_s, s.end_s, s.step) for s in phase_stretches(step, 6.5)]
    assert found == [
        ("forward", 1.0, 2.0, 4), ("backward", 2.0, 4.0, 4), ("optimizer", 4.5, 5.0, 4), ("forward", 6.0, 6.5, 5)
    ]  # fmt: skip
    assert list(phase_stretches(changes(), 1.0)) == []


def test_an_interrupted_phase_that_only_waited_says_so() -> None:
    broken = changes((1.0, Phase.BACKWARD, 4), (9.0, Phase.UPDATED, 3), entered_s=2.0)
    assert [(s.kind, s.begin_s, s.end_s) for s in phase_stretches(broken, 9.0)] == [
        ("backward", 1.0, 2.0), ("wait", 2.0, 9.0)
    ]  # fmt: skip
    computed = changes((1.0, Phase.BACKWARD, 4), (3.0, Phase.UPDATED, 3), entered_s=2.0)
    assert [s.kind for s in phase_stretches(computed, 9.0)] == ["backward"]


def test_the_board_of_a_real_recovery(real: Run) -> None:
    (scene,) = real.scenes
    found = board(real, scene)
    assert [lane.rank for lane in found.lanes] == [0, 1, 2]
    assert found.num_hidden == 0
    assert [len(lane.failed_s) for lane in found.lanes] == [0, 1, 0]
    (takeover,) = found.takeovers
    assert (takeover.rank, takeover.worker) == (1, scene.replacements[1][0])
    steps = [(step, again) for _, _, step, again in found.steps]
    assert (11, False) in steps
    assert (12, False) in steps
    assert (12, True) in steps
    for lane in found.lanes:
        assert all(left.end_s <= right.begin_s for left, right in itertools.pairwise(lane.stretches))
    lost = found.lanes[1]
    kinds = [s.kind for s in lost.stretches if s.begin_s >= found.zero_s]
    assert kinds.index("reset") < kinds.index("restore") < kinds.index("forward")
    assert any(s.kind == "send" for s in found.lanes[0].stretches)
    assert lost.gone is not None
    assert not any(s.begin_s < lost.gone[1] and s.end_s > lost.gone[0] for s in lost.stretches)
    states = [step for _, _, step in found.states]
    assert states[:1] != [None] or states[1] is not None
    assert 12 in states
    assert 13 in states


def test_many_ranks_are_not_all_drawn(simulated: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.trace.pictures.lanes.MAX_LANES", 6)
    run = simulated(6)
    assert run.info.settings.world_size == 8
    (scene,) = run.scenes
    found = board(run, scene)
    lost = {failure.rank for failure in scene.record.failures}
    shown = {lane.rank for lane in found.lanes}
    assert len(found.lanes) + found.num_hidden == 8
    assert lost & shown
    assert shown - lost, "what the others do is seen, too"
    assert len(found.lanes) <= 6 < MAX_LANES
