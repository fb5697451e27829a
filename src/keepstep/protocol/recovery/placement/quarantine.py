"""Quarantine of nodes and devices that failed repeatedly.

A machine often comes back with the same fault. A node or device that failed several times within a window is in
quarantine until it had no failure for the length of the window. The controller prefers others for ranks and spares. If
there is no other, it uses this one anyway, because waiting would not help the job.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A node, or one of its devices."""

    node: str
    device: int | None = None

    def __str__(self) -> str:
        return f"node {self.node}" if self.device is None else f"device {self.device} of node {self.node}"


@dataclasses.dataclass(slots=True)
class _History:
    failed_s: list[float] = dataclasses.field(default_factory=list)
    last: str = ""


class Quarantine:
    """Records failures of places, and the places in quarantine."""

    def __init__(self, num_failures: int, window_s: float) -> None:
        """Args:
        num_failures: number of failures within the window that put a place into quarantine; 0 disables it.
        window_s: length of the window in seconds.
        """
        self._num_failures = num_failures
        self._window_s = window_s
        self._histories: dict[Place, _History] = {}
        self.held: dict[Place, str] = {}
        """Place in quarantine -> reason."""

    def failed(self, place: Place, what: str, now_s: float) -> None:
        """Records a failure of a place."""
        if not self._num_failures:
            return
        history = self._histories.setdefault(place, _History())
        history.failed_s = [*self._recent(history, now_s), now_s]
        history.last = what
        if (times := len(history.failed_s)) >= self._num_failures:
            self.held[place] = f"failed {times} times within {self._window_s:g} s, last: {what}"

    def release(self, now_s: float) -> None:
        """Releases the places without a failure in the whole window."""
        for place in [each for each in self.held if not self._recent(self._histories[each], now_s)]:
            del self.held[place]

    def penalty(self, node: str, device: int) -> int:
        """Returns the penalty of a place: 0 for none, 1 if its device is in quarantine, 2 if its node is."""
        if not self.held:
            return 0
        return 2 if Place(node) in self.held else int(Place(node, device) in self.held)

    def _recent(self, history: _History, now_s: float) -> list[float]:
        return [each for each in history.failed_s if now_s < each + self._window_s]
