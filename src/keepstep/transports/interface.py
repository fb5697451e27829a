"""The interface between agents and controller on one side, and transports on the other.

A connection guarantees one thing: as long as it lasts, messages arrive unchanged and in order.
`keepstep.protocol.reliable_channel` repeats messages that must arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from keepstep.protocol.messages import AnyMessage
from keepstep.protocol.relay.bundle import PacketBundle

PATIENCE_S = 600.0
"""As long as a script may take between two steps: workers that end a step need the controller no later than then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """The connection is open, for the first time or again: what was sent before may have been lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class RelayLost:
    """The relay that held the connections to these nodes has ended."""

    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a node, over a connection that is known to be that node's.

    With relays also a bundle, whose nodes are known in the same way, and the loss of a relay; ``node`` is empty then.
    """

    node: str
    message: AnyMessage | Connected | PacketBundle | RelayLost


class ControllerConnection(Protocol):
    """An agent's connection to its controller."""

    def send(self, message: AnyMessage) -> None:
        """Sends a message, or loses it while there is no connection; never blocks."""

    async def receive(self) -> AnyMessage | Connected:
        """What comes next."""


class NodeConnections(Protocol):
    """A controller's connections to the agents of all nodes."""

    def send(self, node: str, message: AnyMessage) -> None:
        """Sends a message, or loses it while there is no connection to the node; never blocks."""

    async def receive(self) -> Arrival:
        """What comes next, from any node."""

    def more(self) -> Arrival | None:
        """What has come already besides; None where that is nothing, or not known."""

    def refuse(self, node: str, why: str) -> None:
        """Ends the connection to a node that has said what it must not say."""


@runtime_checkable
class BundlingConnections(NodeConnections, Protocol):
    """A controller's connections to the agents of all nodes, held by relays."""

    @property
    def routes(self) -> Mapping[str, int]:
        """node -> the relay that holds its connection."""

    def send_bundles(self, bundles: Sequence[tuple[int, PacketBundle]]) -> None:
        """Sends each relay its bundles, or loses those for one that has ended; never blocks."""
