"""The picture of a recovery where ranks hold different shards."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.support.recorded import LONE, PAIRED, simulate_shards
from tests.trace.pictures.conftest import opened
from tests.trace.pictures.test_recovery import contents, overlapping

from keepstep.trace.pictures.drawing import Polygon, Text
from keepstep.trace.pictures.lanes import board
from keepstep.trace.pictures.recovery import draw_recovery
from keepstep.trace.timeline.run import Run


def recorded(folder: Path, shards: tuple[str, ...]) -> Run:
    simulate_shards(folder, shards, 2)
    return opened(folder)


@pytest.mark.parametrize("shards", [LONE, PAIRED], ids=["no replica", "two replicas"])
def test_each_shard_has_a_heading_above_its_ranks(tmp_path: Path, shards: tuple[str, ...]) -> None:
    picture = draw_recovery(recorded(tmp_path, shards), 1)
    ET.fromstring(picture.svg())
    assert list(overlapping(picture)) == []
    names = [shape for shape in picture.shapes if isinstance(shape, Text) and shape.kind == "name"]
    order = [name.content for name in sorted(names, key=lambda name: name.y)]
    groups = {LONE: [(0,), (1,), (2,), (3,)], PAIRED: [(0, 2), (1, 3)]}[shards]
    expected = []
    for number, ranks in enumerate(groups):
        expected += [f"shard {number}", *(f"rank {rank}" for rank in ranks)]
    assert order == [*expected, "spare"]


def test_without_a_replica_there_is_no_live_copy_until_the_snapshot_is_loaded(tmp_path: Path) -> None:
    run = recorded(tmp_path, LONE)
    (scene,) = run.scenes
    (lost,) = scene.record.failures
    found = board(run, scene)
    gone = {band.number: band.gone for band in found.shards if band.gone is not None}
    (until_s,) = (until_s for _, until_s in gone.values())
    assert gone == {lost.rank: (lost.since_s, until_s)}
    assert all(not (begin_s < until_s and end_s > lost.since_s) for begin_s, end_s, _ in found.shards[lost.rank].states)
    for band in found.shards:
        steps = [step for _, _, step in band.states if step is not None]
        assert scene.record.resume_step in steps
        assert band.origin == "snapshot in memory"
    for lane in found.lanes:
        (used,) = (each for each in lane.snapshots if each.loaded_s is not None)
        assert used.step == scene.record.resume_step
        assert used.begin_s < (used.end_s or 0.0) < lost.since_s < used.loaded_s
    picture = draw_recovery(run, 1)
    assert any("all ranks from snapshots in memory" in text for text in contents(picture))
    assert any("no live copy" in text for text in contents(picture))
    assert len([shape for shape in picture.shapes if isinstance(shape, Polygon) and shape.kind == "complete"]) > 4


def test_with_a_replica_there_always_is_one(tmp_path: Path) -> None:
    run = recorded(tmp_path, PAIRED)
    assert all(band.gone is None for band in board(run, run.scenes[0]).shards)
    assert not [each for lane in board(run, run.scenes[0]).lanes for each in lane.snapshots if each.loaded_s]


def test_a_job_whose_ranks_are_all_replicas_has_one_band(real: Run) -> None:
    found = board(real, real.scenes[0])
    assert (found.shards, [lane.snapshots for lane in found.lanes]) == ([], [[]] * 3)
    assert found.states
