"""The page of a run that has ended, and of a large simulated one: what is drawn, what keys do, who is let in."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from tests.e2e.watched import DEADLINE_MS, card, lanes, row, view
from tests.support.published import published_run

from keepstep.dashboard.process import serving
from keepstep.sim.run import case_of, run
from keepstep.trace.timeline.run import Run

SEED = 1099
"""Some seed whose job has several recoveries, and trains to its end."""
# In both themes a hue is within these bounds of (hue, saturation, value), each from 0 to 255.
HUES = {"blue": (140, 165), "green": (90, 115), "orange": (8, 25), "purple": (178, 200)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ended")
    run(case_of(SEED), record=found)
    return found


@pytest.fixture(scope="module")
def ended(folder: Path) -> Iterator[str]:
    """The link of a run that has ended."""
    with serving(folder, "127.0.0.1:0", "--listen") as link:
        yield link


@pytest.fixture
def told(folder: Path) -> Iterator[Run]:
    """The same run, as its folder tells it."""
    found = Run(folder)
    found.poll()
    yield found
    found.close()


def opened(page: Page, link: str) -> None:
    page.set_default_timeout(DEADLINE_MS)
    page.goto(link)
    row(page, 1).wait_for()


def settled(page: Page) -> bytes:
    """A picture of the timeline when it has come to rest."""
    deadline_s = time.monotonic() + DEADLINE_MS / 1000
    before, found = b"", page.get_by_test_id("timeline").screenshot()
    while before != found:
        assert time.monotonic() < deadline_s, "the timeline of a run that has ended does not come to rest"
        before, found = found, page.get_by_test_id("timeline").screenshot()
    return found


def num_pixels(picture: bytes) -> dict[str, int]:
    """How many pixels of the timeline have each of the strong colours."""
    with Image.open(io.BytesIO(picture)) as image:
        hue, saturation, value = np.moveaxis(np.asarray(image.convert("RGB").convert("HSV")), 2, 0)
    strong = hue[(saturation > 110) & (value > 70)]
    return {name: int(((strong >= low) & (strong <= high)).sum()) for name, (low, high) in HUES.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080)])
def test_the_timeline_is_drawn(page: Page, ended: str, size: tuple[int, int], scheme: Any) -> None:
    """Forward blue, backward green, optimizer orange, recovery purple: seen in the pixels."""
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme=scheme)
    opened(page, ended)
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("n")
    found = num_pixels(settled(page))
    assert all(found[name] > 300 for name in HUES), found
    box = page.get_by_test_id("timeline").bounding_box()
    assert box is not None
    assert box["width"] > 0.9 * size[0]
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_every_recovery_can_be_jumped_to(page: Page, ended: str, told: Run) -> None:
    opened(page, ended)
    for scene in told.scenes:
        row(page, scene.number).click()
        begin, end = scene.since_s * 1e6, (scene.end_s or 0.0) * 1e6
        shown = view(page)
        assert shown["begin"] < begin < end < shown["end"]
        assert not shown["following"]
    page.keyboard.press("p")
    assert view(page)["begin"] < told.scenes[-2].since_s * 1e6 < view(page)["end"]
    page.keyboard.press("n")
    assert view(page)["begin"] < told.scenes[-1].since_s * 1e6 < view(page)["end"]


def test_keys_do_what_the_help_says(page: Page, ended: str, told: Run) -> None:
    opened(page, ended)
    page.keyboard.press("?")
    expect(page.get_by_test_id("help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("help")).not_to_be_visible()
    page.keyboard.press("Home")
    settled(page)
    whole = view(page)
    assert whole["end"] - whole["begin"] >= 0.9 * told.now_s * 1e6
    page.keyboard.press("+")
    settled(page)
    closer = view(page)
    assert closer["end"] - closer["begin"] < whole["end"] - whole["begin"]
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert view(page)["begin"] < closer["begin"]
    page.keyboard.press("-")
    settled(page)
    assert view(page)["end"] - view(page)["begin"] > closer["end"] - closer["begin"]
    page.keyboard.press("End")
    assert view(page)["following"]
    page.keyboard.press(" ")
    assert not view(page)["following"]
    theme = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != theme
    page.keyboard.press("/")
    expect(page.locator("#find")).to_be_focused()


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Page, ended: str) -> None:
    opened(page, ended)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
    assert {"live", "zoom-in", "zoom-out", "whole", "previous", "next", "find", "timeline", "theme"} <= reached
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, a, input, canvas')].filter(e => "
        "!(e.getAttribute('aria-label') || e.textContent.trim() || e.title)).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_events_can_be_filtered(page: Page, ended: str, told: Run) -> None:
    opened(page, ended)
    assert page.get_by_test_id("event-row").count() == min(200, len(told.events))
    page.get_by_role("button", name="errors").click()
    errors = [event for event in told.events if event.level == "error"]
    expect(page.get_by_test_id("event-row")).to_have_count(len(errors))
    expect(page.get_by_test_id("event-row").first).to_contain_text(errors[-1].text[:20])


def test_the_report_is_linked(page: Page, ended: str) -> None:
    opened(page, ended)
    with page.context.expect_page() as caught:
        page.get_by_role("link", name="Report").click()
    row(caught.value, 1).wait_for()
    told = caught.value.locator("#story-recoveries li").filter(has_text="Training resumed at step")
    expect(told.first).to_be_visible()


def test_who_has_no_token_gets_instructions(page: Page, ended: str) -> None:
    answer = page.goto(ended.partition("?")[0])
    assert answer is not None
    assert answer.status == 401
    expect(page.locator("body")).to_contain_text("Open the link that keepstep printed")


def test_the_token_leaves_the_address_bar(page: Page, ended: str) -> None:
    opened(page, ended)
    assert "token" not in page.url
    page.reload()
    row(page, 1).wait_for()


def test_cards_tell_what_the_run_tells(page: Page, ended: str, told: Run) -> None:
    opened(page, ended)
    expect(card(page, "step")).to_contain_text(str(told.pace.step))
    expect(card(page, "recoveries")).to_contain_text(str(len(told.scenes)))
    assert told.goodput is not None
    expect(card(page, "goodput")).to_contain_text(f"{told.goodput * 100:.1f}")
    assert len([lane for lane in lanes(page) if lane["kind"] == "rank"]) == told.info.settings.world_size


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_published_weights_have_a_panel(page: Page, folder: Path, tmp_path: Path, scheme: Any) -> None:
    """Versions, consumers by node, speed, and culprits by name; in the other themes as well as in the report."""
    page.emulate_media(color_scheme=scheme)
    with serving(published_run(folder, tmp_path / "run"), "127.0.0.1:0", "--listen") as link:
        opened(page, link)
        panel = page.get_by_test_id("publication")
        for text in (
            "/run/weights",
            "version 3, ",
            "5 under way for",
            "3 consumers (1 on a, 2 on engine-1) · slowest 2 versions behind, for",
            "2.00 GB in 500 ms, 4.00 GB/s · 3 updates, 1 broken off, 1 consumer left out",
            "ago, version 4 was not published: rank 1: is gone",
            "version 2: engine-1/dead: has shown nothing for 3 s",
        ):
            expect(panel).to_contain_text(text)
        assert panel.evaluate("node => node.scrollWidth <= node.clientWidth")
        with page.context.expect_page() as caught:
            page.get_by_role("link", name="Report").click()
        expect(caught.value.get_by_test_id("publication")).to_contain_text("version 3, ")


def test_a_job_that_publishes_nothing_has_no_such_panel(page: Page, ended: str) -> None:
    opened(page, ended)
    expect(page.get_by_test_id("weights")).to_be_hidden()
