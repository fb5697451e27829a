"""Decides when a relay sends its packets: as soon as the controller has accepted the previous frame."""

from __future__ import annotations

from keepstep.protocol.relay.bundle import Item, NodeConnected, NodeSaid, bundled

SILENT_S = 1.5
"""The controller ends a relay that says nothing for so long. It is half of the default lease, so its nodes can connect
to another one before their leases end."""
BEAT_S = 0.25
"""A relay says something at least so often."""


class Gathering:
    """What has come from agents and was not passed on yet.

    A relay that has nothing under way passes on at once. While the controller works on the last frame more arrives, so
    frames become larger as there is more to do, and their number is bounded by what the controller can take.
    """

    def __init__(self) -> None:
        self._items: list[NodeConnected | NodeSaid] = []
        self._is_under_way = False
        """Whether the controller has not taken the last frame yet."""

    def add(self, item: NodeConnected | NodeSaid) -> None:
        """Something has come from an agent."""
        self._items.append(item)

    def taken(self) -> None:
        """The controller has taken the last frame."""
        self._is_under_way = False

    def take(self, *, even_nothing: bool = False) -> tuple[Item, ...] | None:
        """What is to be passed on now; None while the last frame is under way, or nothing has come.

        Args:
            even_nothing: a sign of life is due.
        """
        if self._is_under_way or not (self._items or even_nothing):
            return None
        self._is_under_way = True
        items, self._items = self._items, []
        return tuple(bundled(items))
