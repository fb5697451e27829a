"""Decides when a relay sends its packets: as soon as the controller has accepted the previous frame."""

from __future__ import annotations

from keepstep.protocol.relay.bundle import Item, NodeConnected, NodeSaid, bundled

SILENT_S = 1.5
"""The controller kills a relay that is silent for so long. It is half of the default lease, so that the relay's nodes
can connect to another relay before their leases expire."""
BEAT_S = 0.25
"""Interval of a relay's signs of life."""


class Gathering:
    """The messages of agents that a relay has not sent to the controller yet.

    If no frame is under way, the relay sends at once. While the controller works on the last frame, more messages
    arrive. So frames grow with the load, and the controller's speed limits their number.
    """

    def __init__(self) -> None:
        self._items: list[NodeConnected | NodeSaid] = []
        self._is_under_way = False
        """Whether the controller has yet to take the last frame."""

    def add(self, item: NodeConnected | NodeSaid) -> None:
        """Adds a message or a new connection of an agent."""
        self._items.append(item)

    def taken(self) -> None:
        """Records that the controller has taken the last frame."""
        self._is_under_way = False

    def take(self, *, even_nothing: bool = False) -> tuple[Item, ...] | None:
        """Returns the items of the next frame; None if the last frame is under way, or nothing has arrived.

        Args:
            even_nothing: a sign of life is due, so return an empty frame instead of None if nothing has arrived.
        """
        if self._is_under_way or not (self._items or even_nothing):
            return None
        self._is_under_way = True
        items, self._items = self._items, []
        return tuple(bundled(items))
