"""The trace of a run keeps the rules of the format, and has in it what happened."""

import io
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.published import FOLDER, published_run
from tests.support.recorded import LONE, simulate_shards
from tests.trace.pictures.conftest import SEEDS, opened

from keepstep.sim.recording import SNAPSHOT_BYTES
from keepstep.trace.pictures.chrome import CONTROLLER, ChromeTrace, Track, write_trace
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.stragglers import Straggler


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


def test_a_rank_that_sends_for_no_time_has_its_arrow(real: Run) -> None:
    """As the journal has it where one look of the controller finds the rank reset, and its part restored."""
    (scene,) = real.scenes
    scene.restored_s[2] = scene.reset_s[2]
    events = exported(real)
    check(events)
    assert [e["name"] for e in events if e["ph"] == "f"].count("state") == 2


def test_a_run_that_ended_badly(overtaken: Run) -> None:
    check(exported(overtaken))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens(simulated: Callable[[int], Run], seed: int) -> None:
    check(exported(simulated(seed)))


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
