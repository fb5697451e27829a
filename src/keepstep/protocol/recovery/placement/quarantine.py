"""Quarantine of nodes and devices that failed repeatedly.

A machine often comes back with the same fault. One that failed several times within a window is in quarantine until it
had no failure for the length of the window: the controller prefers others for ranks and spares. If there is nothing
else it uses the machine anyway, because waiting would not help the job.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A node, or one device of it."""

    node: str
    device: int | None = None

    def __str__(self) -> str:
        return f"node {self.node}" if self.device is None else f"device {self.device} of node {self.node}"


@dataclasses.dataclass(slots=True)
class _History:
    failed_s: list[float] = dataclasses.field(default_factory=list)
    last: str = ""


class Quarantine:
    """Remembers failures, and what is kept apart because of them."""

    def __init__(self, num_failures: int, window_s: float) -> None:
        """Args:
        num_failures: so many put a place into quarantine; 0: nothing ever is.
        window_s: within so long.
        """
        self._num_failures = num_failures
        self._window_s = window_s
        self._histories: dict[Place, _History] = {}
        self.held: dict[Place, str] = {}
        """What is in quarantine, and why."""

    def failed(self, place: Place, what: str, now_s: float) -> None:
        """A place has failed once more."""
        if not self._num_failures:
            return
        history = self._histories.setdefault(place, _History())
        history.failed_s = [*self._recent(history, now_s), now_s]
        history.last = what
        if (times := len(history.failed_s)) >= self._num_failures:
            self.held[place] = f"failed {times} times within {self._window_s:g} s, last: {what}"

    def release(self, now_s: float) -> None:
        """Lets go what has been quiet for the whole window."""
        for place in [each for each in self.held if not self._recent(self._histories[each], now_s)]:
            del self.held[place]

    def penalty(self, node: str, device: int) -> int:
        """The penalty of a place: 0 nothing, 1 its device, 2 its node is in quarantine."""
        if not self.held:
            return 0
        return 2 if Place(node) in self.held else int(Place(node, device) in self.held)

    def _recent(self, history: _History, now_s: float) -> list[float]:
        return [each for each in history.failed_s if now_s < each + self._window_s]
