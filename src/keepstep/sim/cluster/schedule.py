"""Virtual time: a queue of future events."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An event of one part of the cluster: the name of a method of that part, and its arguments."""

    part: str
    what: str
    arguments: tuple[Any, ...] = ()


class Schedule:
    """A queue of events, ordered by time, and at equal times by insertion. Nothing ever sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._entries: list[tuple[float, int, Event]] = []

    def after(self, delay_s: float, event: Event) -> None:
        """Adds an event ``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, event)

    def at(self, at_s: float, event: Event) -> None:
        """Adds an event at a time. A time in the past counts as now."""
        self.num_events += 1
        heapq.heappush(self._entries, (max(at_s, self.now_s), self.num_events, event))

    def next(self) -> Event | None:
        """Advances the time to the next event and returns it; None if there is none."""
        if not self._entries:
            return None
        self.now_s, _, event = heapq.heappop(self._entries)
        return event
