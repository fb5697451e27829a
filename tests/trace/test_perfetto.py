"""The trace of a run keeps the rules of the format, and has in it what happened."""

import io
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.published import FOLDER, published_run
from tests.support.recorded import LONE, NUM_RANKS, overtaken_run, recorded_run, simulate_shards

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.sim.recording import SNAPSHOT_BYTES
from keepstep.sim.run import case_of
from keepstep.sim.run import run as simulate
from keepstep.trace.perfetto import CONTROLLER, ChromeTrace, Stretch, Track, phase_stretches, without, write_trace
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseArray
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.stragglers import Straggler

SEEDS = range(1, 25)
"""Among them: nodes that are lost, clocks that disagree, failures that overtake each other, jobs that end badly."""


def opened(folder: Path) -> Run:
    """A run, read to its end."""
    found = Run(folder)
    found.poll()
    return found


@pytest.fixture
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run of three ranks, one of which was killed in the backward of step 12."""
    found = opened(recorded_run(tmp_path_factory.getbasetemp()).folder)
    yield found
    found.close()


@pytest.fixture
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A real run whose first recovery was overtaken, and whose second was not completed."""
    found = opened(overtaken_run(tmp_path_factory.getbasetemp()).folder)
    yield found
    found.close()


def exported(run: Run) -> list[dict[str, Any]]:
    file = io.BytesIO()
    write_trace(run, file)
    trace = json.loads(file.getvalue())
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert file.getvalue().count(b"\n") == len(events) + 2, "one event a line"
    return events


def check(events: list[dict[str, Any]]) -> None:
    """The rules: times rise, events of a track do not overlap, an arrow has both ends, each in an event."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            begin = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for spans in tracks.values():
        spans.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    for ends in flows.values():
        assert [end["ph"] for end in ends] == ["s", "f"]
        for end in ends:
            at = round(end["ts"] * 1000)
            assert any(begin <= at < until for begin, until in tracks[end["pid"], end["tid"]])
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}


def test_a_real_run(real: Run) -> None:
    events = exported(real)
    check(events)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {name for (pid, _), name in tracks.items() if pid != CONTROLLER} == {"rank 0", "rank 1", "rank 2"}
    done = [e for e in events if e["ph"] == "X" and e["name"] == "forward" and tracks[e["pid"], e["tid"]] == "rank 0"]
    assert {e["args"]["step"] for e in done} == set(range(30))
    assert len([e for e in done if e["args"]["step"] == 12]) == 2, "that step was computed again"
    counted = [e["args"]["step"] for e in events if e["ph"] == "C"]
    assert counted == list(range(1, 31))
    arrows = [e for e in events if e["ph"] == "f"]
    assert sorted(e["name"] for e in arrows) == ["replaced", "state", "state"]
    assert {tracks[e["pid"], e["tid"]] for e in arrows} == {"rank 1"}
    (failure,) = (e for e in events if e["ph"] == "i" and e["cat"] == "failure")
    assert failure["args"]["cause"] == "signal"
    told = {e["args"]["text"] for e in events if e["ph"] == "i" and e["cat"] == "control"}
    assert told == {event.text for event in real.events}


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2)])
def test_ranks_that_send_and_restore_for_no_time_have_their_arrows(real: Run, ranks: tuple[int, ...]) -> None:
    """As the journal has it where one look of the controller finds ranks reset, and their parts restored."""
    (scene,) = real.scenes
    for rank in ranks:
        scene.restored_s[rank] = scene.reset_s[rank]
    if len(ranks) == NUM_RANKS:
        scene.record.restored_s = max(scene.reset_s.values())
    events = exported(real)
    check(events)
    assert sorted(e["name"] for e in events if e["ph"] == "f") == ["replaced", "state", "state"]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_rank_that_has_not_got_its_state_yet_has_no_arrow_to_its_reset(real: Run, *, is_reset: bool) -> None:
    """While it is reset, nothing has been sent; once it is, its restore has begun."""
    (scene,) = real.scenes
    scene.restored_s.clear()
    if not is_reset:
        del scene.reset_s[1]
    events = exported(real)
    check(events)
    found = sorted(e["name"] for e in events if e["ph"] == "f")
    assert found == (["replaced", "state", "state"] if is_reset else [])


def test_a_run_that_ended_badly(overtaken: Run) -> None:
    check(exported(overtaken))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(tmp_path: Path, seed: int) -> None:
    simulate(case_of(seed), record=tmp_path)
    check(exported(opened(tmp_path)))


def test_the_check_sees_what_is_wrong() -> None:
    def trace(write: Callable[[ChromeTrace, Track], None]) -> list[dict[str, Any]]:
        file = io.BytesIO()
        made = ChromeTrace(file, 0, {})
        made.process(1, "one")
        made.track(Track(1, 0), "track")
        write(made, Track(1, 0))
        made.end()
        events: list[dict[str, Any]] = json.loads(file.getvalue())["traceEvents"]
        return events

    def well(made: ChromeTrace, track: Track) -> None:
        made.complete(track, "a", "x", (0, 10), {})
        made.complete(track, "b", "x", (10, 20), {})
        made.flow("arrow", (track, 0), (track, 19))

    def overlapping(made: ChromeTrace, track: Track) -> None:
        made.complete(track, "a", "x", (0, 10), {})
        made.complete(track, "b", "x", (9, 20), {})

    def in_the_air(made: ChromeTrace, track: Track) -> None:
        made.complete(track, "a", "x", (0, 10), {})
        made.flow("arrow", (track, 0), (track, 10))

    def nameless(made: ChromeTrace, track: Track) -> None:
        made.complete(Track(1, 7), "a", "x", (0, 10), {})

    check(trace(well))
    for wrong in (overlapping, in_the_air, nameless):
        with pytest.raises(AssertionError):
            check(trace(wrong))


def test_stragglers_are_marked(real: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real.stragglers, "found", lambda: [Straggler(1, "backward", 30.0, 20.0)])
    events = exported(real)
    check(events)
    (mark,) = [event for event in events if event.get("cat") == "straggler"]
    assert mark["name"] == "slow backward, 1.5 times the others"
    (track,) = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == "rank 1"]
    assert (mark["pid"], mark["tid"]) == (track["pid"], track["tid"])


def test_what_becomes_of_snapshots_is_marked(tmp_path: Path) -> None:
    simulate_shards(tmp_path, LONE, 2)
    events = exported(opened(tmp_path))
    check(events)
    marks = [event for event in events if event.get("cat") == "snapshot"]
    names = Counter(mark["name"].partition(",")[0] for mark in marks)
    assert (names["snapshot complete"], names["snapshot loaded"]) == (6 * len(LONE) + 1, len(LONE))
    assert all(mark["args"]["bytes"] == SNAPSHOT_BYTES for mark in marks)


def test_an_update_of_weights_has_a_track_for_each_device_and_stage(real: Run, tmp_path: Path) -> None:
    run = opened(published_run(real.folder, tmp_path / "run"))
    events = exported(run)
    check(events)
    devices = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    stages = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [
        (devices[e["pid"]], stages[e["pid"], e["tid"]], e["name"], e["args"]["bucket"], e["args"]["version"])
        for e in events
        if e.get("cat") in ("h2d", "broadcast", "reload")
    ]
    assert sorted(found) == sorted(
        (f"weights in {FOLDER}, device {device}", stage, f"{stage} b{bucket}", bucket, 3)
        for device in (0, 1)
        for stage in ("H2D", "Broadcast", "Reload")
        for bucket in range(3)
    ), "the last committed version"
    begun_s = run.publications.found[FOLDER].devices[0].committed_span_s[0]
    (reload,) = (e for e in events if e["name"] == "Reload b1" and devices[e["pid"]].endswith("device 1"))
    assert reload["ts"] == pytest.approx((begun_s + 0.3 - run.info.started_ns / 1e9) * 1e6)
    assert reload["dur"] == pytest.approx(0.1e6)


# ---- the parts of a track -------------------------------------------------------------------------------------------

PAIRS = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1])))


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
    whole = [Stretch("forward", *pair, "forward") for pair in pairs]
    busy = covered([Stretch("stop", *pair, "stop") for pair in taken])
    left = list(without(whole, taken))
    assert covered(left) == covered(whole) - busy
    assert all(stretch.end_s > stretch.begin_s for stretch in left)


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
