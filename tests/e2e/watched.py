"""What tests of the page share: a job in the background whose link is known, and what a page shows as numbers."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page
from tests.support.jobs import EXAMPLES, RunningJob, running

DEADLINE_MS = 120_000
"""Ends a test that hangs; no measure of anything."""
GPT = EXAMPLES / "train_gpt.py"


class WatchedJob:
    """A running command with a dashboard."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.lines: list[str] = []
        self._known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.job.process.stderr is not None
        for line in self.job.process.stderr:
            self.lines.append(line)
            if "token=" in line:
                self._known.set()
        self._known.set()

    @property
    def link(self) -> str:
        """The link that it printed."""
        assert self._known.wait(DEADLINE_MS / 1000)
        found = re.search(r"http://\S+", "".join(self.lines))
        assert found, "".join(self.lines)
        return found[0]

    def finish(self) -> int:
        """Waits for the end; returns the exit code."""
        assert self.job.process.stdout is not None
        self.job.process.stdout.read()
        code = self.job.process.wait(DEADLINE_MS / 1000)
        self._reader.join(DEADLINE_MS / 1000)
        return code


@contextlib.contextmanager
def watched(*arguments: object, cwd: Path) -> Iterator[WatchedJob]:
    """A command in the background; nothing of it survives the block."""
    with running(*arguments, cwd=cwd) as job:
        found = WatchedJob(job)
        yield found
    found._reader.join(DEADLINE_MS / 1000)


def row(page: Page, number: int) -> Locator:
    """A recovery in the list."""
    return page.locator(f"[data-testid=recovery-row][data-number='{number}']")


def card(page: Page, name: str) -> Locator:
    """One of the cards."""
    return page.get_by_test_id(f"card-{name}")


def number_in(text: str) -> float:
    """The first number that a text shows."""
    found = re.search(r"\d+(?:\.\d+)?", text.replace(",", "").replace("\u202f", ""))
    assert found, text
    return float(found[0])


def view(page: Page) -> dict[str, Any]:
    """Which stretch of time the timeline shows, and whether it follows the present."""
    return dict(page.evaluate("() => window.keepstep.view()"))


def lanes(page: Page) -> list[dict[str, Any]]:
    """The lanes from top to bottom."""
    return list(page.evaluate("() => window.keepstep.lanes()"))


def eventually(page: Page, holds: Callable[[], bool]) -> None:
    """Waits, frame by frame, until something holds; Playwright's own way is refused by the page's security policy."""
    deadline_s = time.monotonic() + DEADLINE_MS / 1000
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        page.evaluate("() => new Promise(requestAnimationFrame)")
