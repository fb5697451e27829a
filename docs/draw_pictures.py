"""Makes the pictures of README.md and observe.md from real runs; needs Debian's chromium.

    python docs/draw_pictures.py

They show what a browser and a terminal show, so they differ from run to run, and nothing checks that they are up to
date: run this when the page has changed, and look at what comes of it.
"""

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console

from keepstep.cli.terminal.screen import Screen
from keepstep.dashboard.process import serving
from keepstep.trace.timeline.run import Run

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

import dashboard_feed  # noqa: E402  # after the path that it lies in
from tests.e2e.watched import GPT, row, watched  # noqa: E402  # the same

FAULTS = "kill@step=12,phase=backward,rank=2; kill@step=30,phase=backward,rank=1"
NUM_STEPS = 110
DEADLINE_MS = 120_000
SHARDED_FAULTS = "kill@step=11,phase=backward,rank=1"
SHARDED_STEPS = 16
TOP_COLUMNS, TOP_LINES = 132, 30
REST_S = 1.5
"""Until what slides has come to rest."""


def take(page: Page, name: str) -> None:
    """A screenshot."""
    time.sleep(REST_S)
    page.screenshot(path=PICTURES / name)


def drill(page: Page, folder: Path) -> None:
    """The page in the middle of a drill, the terminal at the same moment, and the lanes of one recovery."""
    for script in (GPT, GPT.with_name("parallel_gpt.py")):
        shutil.copy(script, folder)  # so that the page names it as a user would
    command = ["drill", "--nproc-per-node", 3, "--dashboard=127.0.0.1:0", "--run-dir", "drill", "--faults", FAULTS]
    with watched(*command, GPT.name, "--steps", NUM_STEPS, cwd=folder) as job:
        page.goto(job.link)
        page.set_default_timeout(DEADLINE_MS)
        gap = row(page, 2).get_by_test_id("recovery-ms-gap")
        expect(gap).to_have_text(re.compile(r"\d"), timeout=DEADLINE_MS)
        run = Run(folder / "drill" / "with-faults")
        draw_top(run)
        row(page, 2).click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            take(page, f"dashboard-{scheme}.png")
            page.locator("section.time").screenshot(path=PICTURES / f"recovery-{scheme}.png")
        page.emulate_media(color_scheme="light")
        assert job.finish() == 0
        run.close()


def draw_top(run: Run) -> None:
    """What `keepstep top` shows, as a picture that asks for no font from elsewhere."""
    screen = Screen(run)
    screen.take(run.poll())
    console = Console(record=True, width=TOP_COLUMNS, height=TOP_LINES, file=sys.stderr, force_terminal=True)
    console.print(screen.draw(TOP_COLUMNS, TOP_LINES))
    svg = console.export_svg(title="keepstep top")
    (PICTURES / "top.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


def shards(page: Page, folder: Path) -> None:
    """The timeline of a job whose ranks hold different shards, and that has lost one of them."""
    script = (ROOT / "tests" / "scripts" / "hsdp.py", "--replicas", 1, "--snapshot-every", 3, "--steps", SHARDED_STEPS)
    command = ["drill", "--nproc-per-node", 4, "--spares", 1, "--dashboard=127.0.0.1:0", "--run-dir", "sharded"]
    with watched(*command, "--faults", SHARDED_FAULTS, *script, cwd=folder) as job:
        assert job.finish() == 0
    with serving(folder / "sharded" / "with-faults", "127.0.0.1:0", "--listen") as link:
        page.goto(link)
        row(page, 1).click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            time.sleep(REST_S)
            page.locator("section.time").screenshot(path=PICTURES / f"shards-{scheme}.png")
        page.emulate_media(color_scheme="light")


def many_ranks(page: Page, folder: Path) -> None:
    """The page of a large simulated job, just after it has lost a node."""
    until_s = 24.0
    dashboard_feed.simulate(folder / "recorded", 128, 8, until_s)
    with (
        dashboard_feed.Feeder(folder / "recorded", folder / "fed", until_s * 2 / 3 - 4),
        serving(folder / "fed", "127.0.0.1:0", "--listen") as link,
    ):
        page.goto(link)
        row(page, 2).wait_for()
        expect(row(page, 2).get_by_test_id("recovery-ms-gap")).to_have_text(re.compile(r"\d"), timeout=DEADLINE_MS)
        take(page, "dashboard-1024.png")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        drill(page, Path(folder))
        shards(page, Path(folder))
        page.set_viewport_size({"width": 1600, "height": 900})
        many_ranks(page, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
