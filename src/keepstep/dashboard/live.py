"""Follows a run's folder, and sends each update to all open pages."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from keepstep.dashboard import wire
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.trace.record import runfolder
from keepstep.trace.timeline.run import News, Run

POLL_INTERVAL_S = 0.2
"""Poll interval while a page is open: the interval at which agents gather phases. The folder is polled because it may
be on a file system without change notifications."""
POLL_INTERVAL_S_PER_PAGE = 0.0025
MAX_POLL_INTERVAL_S = 0.5
"""Each page costs about 50 microseconds a poll. So the interval grows from 80 pages on, up to 0.5 s with 200."""
IDLE_POLL_INTERVAL_S = 1.0
"""Poll interval while no page is open."""
SLOW_S = 1.0
"""Interval for data that changes slowly: stragglers, goodput, and another run in the folder."""
SNAPSHOT_CHANGES = 40_000
"""Number of phase changes that a page gets when it opens. It requests older ones."""
SNAPSHOT_NS = 60_000_000_000
BACKLOG = 50
"""A page that is this many updates behind, about ten seconds, is disconnected. It reconnects by itself and gets the
current state."""


class Live:
    """Follows one folder and updates its open pages."""

    def __init__(self, folder: Path, on_news: Callable[[Run, News], None]) -> None:
        """Args:
        folder: the folder of a run, or a folder with several runs, such as a drill's.
        on_news: called with the news of each poll, even if no page is open.
        """
        self.folder = folder
        self.run: Run | None = None
        self._on_news = on_news
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._told: dict[str, Any] = {}
        """The last sent value of each part that is only sent when it changes."""
        self._snapshot: bytes | None = None
        self._slow_s = 0.0
        self._error = ""
        self._opened = asyncio.Event()

    # ---- pages ------------------------------------------------------------------------------------------------------

    def open_page(self) -> asyncio.Queue[bytes | None]:
        """Adds a page. Its queue has first the current state, then updates, and None when the page is disconnected."""
        page: asyncio.Queue[bytes | None] = asyncio.Queue()
        if self.run is not None:
            page.put_nowait(self._present())
        self._pages.add(page)
        self._opened.set()
        return page

    def close_page(self, page: asyncio.Queue[bytes | None]) -> None:
        """Removes a page."""
        self._pages.discard(page)

    @property
    def num_pages(self) -> int:
        """Number of open pages."""
        return len(self._pages)

    def _send(self, data: bytes) -> None:
        for page in list(self._pages):
            if page.qsize() >= BACKLOG:
                self._pages.discard(page)
                page.put_nowait(None)
            else:
                page.put_nowait(data)

    # ---- the folder -------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Polls the folder without end."""
        while True:
            self.poll()
            if self._pages:
                await asyncio.sleep(
                    min(max(POLL_INTERVAL_S, POLL_INTERVAL_S_PER_PAGE * len(self._pages)), MAX_POLL_INTERVAL_S)
                )
                continue
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_POLL_INTERVAL_S):
                    await self._opened.wait()

    def poll(self) -> None:
        """Reads the folder once, and sends the news to all pages."""
        now_s = time.monotonic()
        is_slow_due = now_s >= self._slow_s
        if is_slow_due:
            self._slow_s = now_s + SLOW_S
        try:
            if is_slow_due or self.run is None:
                self._find_run()
            if self.run is not None:
                self._tell(self.run, self.run.poll(), is_slow_due)
        except (KeepstepError, OSError) as error:
            if str(error) != self._error:  # print an error once, and not at every poll
                print(f"keepstep dashboard: {error}", file=sys.stderr, flush=True)
            self._error = str(error)

    def _find_run(self) -> None:
        try:
            newest = runfolder.newest_run(self.folder)
        except ConfigurationError:
            return  # none has begun yet
        if self.run is not None and newest == self.run.folder and not self.run.is_replaced:
            return
        if self.run is not None:
            self.run.close()
        self.run = Run(newest)
        self._on_news(self.run, self.run.poll())
        self._told, self._snapshot = {}, None
        self._send(self._present())

    def _tell(self, run: Run, news: News, is_slow_due: bool) -> None:
        self._on_news(run, news)
        update: dict[str, Any] = {}
        if len(news.changes) or len(news.moments):
            update["phases"] = wire.describe_phases(run, np.concatenate([news.changes, news.moments]))
        if news.events:
            update["events"] = [wire.describe_event(run, event) for event in news.events]
        if news.scenes:
            update["recoveries"] = [wire.describe_scene(run, scene) for scene in news.scenes.values()]
        changing: dict[str, Any] = {}
        if news.has_decided:
            changing["workers"] = wire.describe_workers(run)
        if news.is_any or is_slow_due:
            changing["job"] = wire.describe_job(run)
        if news.has_published or is_slow_due:
            changing["weights"] = wire.describe_weights(run)
        if is_slow_due:
            changing["run"] = wire.describe_run(run)
            changing["stragglers"] = wire.describe_stragglers(run.stragglers.found())
        update |= {name: value for name, value in changing.items() if self._told.get(name) != value}
        self._told |= changing
        if update or is_slow_due:
            self._snapshot = None
            update["now"] = wire.micros(run, run.now_s)
            if self._pages:
                self._send(_event("update", update))

    def _present(self) -> bytes:
        """Returns the state that a new page gets. It is cached until the next update."""
        assert self.run is not None
        if self._snapshot is None:
            run = self.run
            recent = run.history.newest(SNAPSHOT_CHANGES)
            recent = recent[recent["at_ns"] >= run.history.end_ns - SNAPSHOT_NS]
            begin_ns = int(recent["at_ns"][0]) if len(recent) else run.info.started_ns
            recent = run.history.records(begin_ns, run.history.end_ns + 1)
            whole = wire.describe_state(run, run.events[-wire.MAX_EVENTS :])
            whole |= {"phases": wire.describe_phases(run, recent), "phases_from": wire.micros(run, begin_ns / 1e9)}
            self._snapshot = _event("snapshot", whole)
        return self._snapshot


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
