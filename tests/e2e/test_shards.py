"""The page and the report of a real job without replicas that has lost a rank: shards, and snapshots."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor
from playwright.sync_api import Page, expect
from tests.e2e.test_page import opened, settled
from tests.e2e.test_report import show
from tests.e2e.watched import lanes, row
from tests.support.jobs import SCRIPTS, drill
from tests.support.recorded import PAIRED, simulate_shards

from keepstep.dashboard.process import serving

NUM_RANKS, LOST, EVERY, NUM_STEPS = 4, 1, 2, 12
RESUMED = 6
STRIP = 8
"""Pixels at the lower edge of a lane, in which snapshots are drawn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FSDP2 on four ranks, one of which is killed in the step behind that of the newest snapshot."""
    found = tmp_path_factory.mktemp("fsdp2")
    script = (SCRIPTS / "hsdp.py", "--replicas", 1, "--snapshot-every", EVERY, "--steps", NUM_STEPS)
    kill = f"kill@step={RESUMED + 1},phase=backward,rank={LOST}"
    job = ("--nproc-per-node", NUM_RANKS, "--spares", 1, "--run-dir", found, "--faults", kill, *script)
    code, result, output = drill(found, *job)
    assert code == 0, output
    (fault,) = result["faults"]
    assert (fault["resume_step"], fault["state_from"]) == (RESUMED, "snapshot in memory")
    (recovery,) = result["recoveries"]
    assert recovery["origins"] == {str(rank): "snapshot in memory" for rank in range(NUM_RANKS)}
    return found / "with-faults"


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[str]:
    with serving(folder, "127.0.0.1:0", "--listen") as found:
        yield found


def colour(page: Page, name: str) -> tuple[int, ...]:
    """One of the style sheet's."""
    return ImageColor.getrgb(
        page.evaluate(f"() => getComputedStyle(document.documentElement).getPropertyValue('--c-{name}').trim()")
    )


def num_pixels(picture: bytes, rows: tuple[float, float], wanted: tuple[int, ...]) -> int:
    """How many pixels between two heights have exactly this colour."""
    with Image.open(io.BytesIO(picture)) as image:
        part = np.asarray(image.convert("RGB"))[round(rows[0]) : round(rows[1])]
    return int((part == wanted).all(axis=2).sum())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shards_and_snapshots_are_drawn(page: Page, link: str, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 1280, "height": 900})
    opened(page, link)
    page.keyboard.press("n")
    picture, found = settled(page), lanes(page)
    expected = [name for rank in range(NUM_RANKS) for name in (f"shard {rank}", f"rank {rank}")]
    assert [lane["name"] for lane in found] == [*expected, "spare"]
    snapshot, gone = colour(page, "snapshot"), colour(page, "gone")
    for lane in found:
        bottom = lane["top"] + lane["height"]
        num = num_pixels(picture, (bottom - STRIP, bottom), snapshot)
        assert num > 60 if lane["kind"] == "rank" else num == 0, lane
        if lane["kind"] == "shard":
            num = num_pixels(picture, (lane["top"], bottom), gone)
            assert num > 200 if lane["name"] == f"shard {LOST}" else num == 0, lane
    expect(page.locator("#legend-snapshot")).to_be_visible()
    expect(row(page, 1)).to_contain_text("2 steps recomputed · snapshot")


def test_each_step_of_a_shard_is_drawn_in_its_place(page: Page, link: str) -> None:
    """A survivor that rewinds shows the end of the step that was undone before it shows that of the snapshot."""
    opened(page, link)
    folds = page.evaluate(
        "() => [...window.keepstep.model.live.shards.values(), window.keepstep.model.live.job].map(fold => "
        "Array.from({ length: fold.newest + 1 }, (_, n) => [fold.g[n], fold.s[n]]))"
    )
    expected = [[1, step] for step in range(RESUMED + 2)] + [[2, step] for step in range(RESUMED, NUM_STEPS)]
    assert len(folds) == NUM_RANKS + 1
    for fold in folds:
        # A replacement begins after the step before.
        assert [each for each in fold if each[1] >= 0 and each != [2, RESUMED - 1]] == expected
        assert fold == sorted(fold)


def test_the_tooltip_names_the_snapshot_and_where_a_state_came_from(page: Page, link: str) -> None:
    opened(page, link)
    page.keyboard.press("n")
    settled(page)
    box = page.get_by_test_id("timeline").bounding_box()
    assert box is not None
    lane = next(lane for lane in lanes(page) if lane["name"] == "rank 0")
    texts = set()
    for x in range(200, round(box["width"]), 3):
        page.mouse.move(box["x"] + x, box["y"] + lane["top"] + lane["height"] / 2)
        page.evaluate("() => new Promise(requestAnimationFrame)")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        texts.add(page.locator("#tooltip").inner_text())
    assert any(f"of step {RESUMED}, complete after" in text for text in texts), texts
    assert any("state from\nsnapshot in memory" in text for text in texts), texts


def test_the_report_tells_which_snapshots_were_used(page: Page, folder: Path, tmp_path: Path) -> None:
    show(page, folder, tmp_path / "report.html")
    story = page.locator("#story-recoveries li")
    expect(story).to_contain_text(f"All ranks loaded their snapshots of step {RESUMED} in memory.")
    assert [lane["kind"] for lane in lanes(page)] == [*["shard", "rank"] * NUM_RANKS, "spare"]


def test_replicas_of_a_shard_stand_together(page: Page, tmp_path: Path) -> None:
    simulate_shards(tmp_path, PAIRED, EVERY)
    with serving(tmp_path, "127.0.0.1:0", "--listen") as link:
        opened(page, link)
        names = [lane["name"] for lane in lanes(page)]
    assert names == ["shard 0", "rank 0", "rank 2", "shard 1", "rank 1", "rank 3", "spare"]
