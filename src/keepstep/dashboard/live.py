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
"""While a page is open: as often as agents gather phases. The folder is polled, for it may lie on a file system that
tells of no changes."""
POLL_INTERVAL_S_PER_PAGE = 0.0025
MAX_POLL_INTERVAL_S = 0.5
"""With more than 80 pages, each of which costs about 50 microseconds a poll, less often: half a second with 200."""
IDLE_POLL_INTERVAL_S = 1.0
"""While none is."""
SLOW_S = 1.0
"""What changes slowly (stragglers, goodput, another run in the folder) is polled so often."""
SNAPSHOT_CHANGES = 40_000
"""Phase changes that a page gets when it is opened; older ones it asks for."""
SNAPSHOT_NS = 60_000_000_000
BACKLOG = 50
"""A page so many updates behind, ten seconds, is cut off; it comes back by itself and gets the current state."""


class Live:
    """One folder, and the pages that look at it."""

    def __init__(self, folder: Path, on_news: Callable[[Run, News], None]) -> None:
        """Args:
        folder: of a run, or one with runs in it (a drill's).
        on_news: called with everything new, pages or not.
        """
        self.folder = folder
        self.run: Run | None = None
        self._on_news = on_news
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._told: dict[str, Any] = {}
        """What the pages know of that which is sent when it changes."""
        self._snapshot: bytes | None = None
        self._slow_s = 0.0
        self._error = ""
        self._opened = asyncio.Event()

    # ---- pages ------------------------------------------------------------------------------------------------------

    def open_page(self) -> asyncio.Queue[bytes | None]:
        """A page opens: first the current state comes out of the queue, then what changes; None: it was cut off."""
        page: asyncio.Queue[bytes | None] = asyncio.Queue()
        if self.run is not None:
            page.put_nowait(self._present())
        self._pages.add(page)
        self._opened.set()
        return page

    def close_page(self, page: asyncio.Queue[bytes | None]) -> None:
        """It is closed."""
        self._pages.discard(page)

    @property
    def num_pages(self) -> int:
        """How many are open."""
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
        """Polls the folder for ever."""
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
        """Reads the folder once, and sends what is new to all pages."""
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
            if str(error) != self._error:  # once, not ten times a second
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
        """The state as a page gets it when it opens; of several that open at once, all get the same."""
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
