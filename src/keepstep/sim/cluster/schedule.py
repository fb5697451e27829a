"""Virtual time: the future events in their order."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happens to one part of the cluster: the name of a method of that part, and its arguments."""

    part: str
    what: str
    arguments: tuple[Any, ...] = ()


class Schedule:
    """Events by time; those of one moment in the order in which they were entered. Nothing ever sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._entries: list[tuple[float, int, Event]] = []

    def after(self, delay_s: float, event: Event) -> None:
        """Enters an event ``delay_s`` seconds from now."""
        self.at(self.now_s + delay_s, event)

    def at(self, at_s: float, event: Event) -> None:
        """Enters an event at a time, which must not be past."""
        self.num_events += 1
        heapq.heappush(self._entries, (max(at_s, self.now_s), self.num_events, event))

    def next(self) -> Event | None:
        """Moves time on to the next event and returns it; None when there is none."""
        if not self._entries:
            return None
        self.now_s, _, event = heapq.heappop(self._entries)
        return event
