"""The report of a run in a real browser: the dashboard's page, without its server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page, Request, expect
from tests.e2e.test_page import HUES, SEED, num_pixels, settled
from tests.e2e.watched import DEADLINE_MS, card, row, view

from keepstep.dashboard import report
from keepstep.dashboard.report import html_report
from keepstep.sim.run import case_of, run
from keepstep.trace.record import runfolder
from keepstep.trace.timeline.run import opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ended")
    run(case_of(SEED), record=found)
    return found


def show(page: Page, folder: Path, html: Path) -> None:
    """Opens the report of a run as a file."""
    with opened(folder) as ended:
        html.write_text(html_report(ended), encoding="utf-8")
    page.set_default_timeout(DEADLINE_MS)
    page.goto(html.as_uri())
    row(page, 1).wait_for()


def test_it_shows_what_the_dashboard_shows(page: Page, folder: Path, tmp_path: Path) -> None:
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    show(page, folder, tmp_path / "report.html")
    with opened(folder) as ended:
        scenes, events, goodput = ended.scenes, ended.events, ended.goodput or 0.0
        steps, started_s = ended.pace.step, ended.info.started_ns / 1e9
    expect(card(page, "step")).to_contain_text(str(steps))
    expect(card(page, "goodput")).to_contain_text(f"{goodput * 100:.1f}")
    expect(page.get_by_test_id("connection")).to_contain_text("job ended")
    assert page.get_by_test_id("event-row").count() == len(events)
    # It opens at the last recovery; a click shows another one.
    for scene in (scenes[-1], scenes[0]):
        since = (scene.since_s - started_s) * 1e6
        assert view(page)["begin"] < since < view(page)["end"]
        found = num_pixels(settled(page))
        assert all(found[name] > 100 for name in HUES), found
        row(page, scenes[0].number).click()
    page.keyboard.press("Home")
    settled(page)
    expect(page.locator("#story-recoveries li")).to_have_count(len(scenes))
    expect(page.locator("#story-recoveries li").filter(has_text="Training resumed at step").first).to_be_visible()
    expect(page.locator("#restart-rows tr")).to_have_count(3)
    expect(page.get_by_role("link", name="Report")).not_to_be_visible()
    assert [request.url for request in asked if not request.url.startswith(("file:", "data:"))] == []


def test_phases_that_a_long_run_leaves_out_are_no_error(
    page: Page, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_CHANGES", 300)
    show(page, folder, tmp_path / "report.html")
    row(page, 1).click()
    settled(page)
    page.keyboard.press("Home")
    settled(page)
    for _ in range(6):
        page.keyboard.press("+")
    settled(page)
    with opened(folder) as ended:
        num_windows = len(ended.scenes) + 1  # around each recovery, and the run's end
    assert page.evaluate("() => window.keepstep.model.windows.length") == num_windows


def test_a_run_without_a_failure_and_without_an_end(page: Page, tmp_path: Path) -> None:
    """What is there is shown, of a job whose launcher was killed too."""
    seed = next(seed for seed in range(1, 100) if not recoveries_of(seed, tmp_path / str(seed)))
    folder = tmp_path / str(seed)
    runfolder.write(folder, msgspec.structs.replace(runfolder.read_info(folder), ended=None))
    with opened(folder) as ended:
        assert ended.info.ended is None
        (tmp_path / "report.html").write_text(html_report(ended), encoding="utf-8")
    page.set_default_timeout(DEADLINE_MS)
    page.goto((tmp_path / "report.html").as_uri())
    expect(page.get_by_test_id("connection")).to_contain_text("launcher is gone")
    expect(page.locator("#live")).not_to_contain_text("ive")
    expect(page.locator("#no-recovery")).to_be_visible()
    expect(page.locator("#restart")).not_to_be_visible()
    expect(page.locator("#story-run")).to_contain_text("rank")


def recoveries_of(seed: int, folder: Path) -> int:
    run(case_of(seed), record=folder)
    with opened(folder) as found:
        return len(found.scenes)
