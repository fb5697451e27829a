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
"""How long an agent waits for a connection, in seconds: as long as a script may take between two steps, because workers
need the controller by then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """A connection has been opened, for the first time or again. Messages sent before may have been lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class RelayLost:
    """The relay that held the connections to these nodes has ended."""

    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a node, over a connection whose token has identified the node.

    With relays, also a bundle of such messages, or the loss of a relay. ``node`` is empty then.
    """

    node: str
    message: AnyMessage | Connected | PacketBundle | RelayLost


class ControllerConnection(Protocol):
    """An agent's connection to its controller."""

    def send(self, message: AnyMessage) -> None:
        """Sends a message; drops it if there is no connection. Never blocks."""

    async def receive(self) -> AnyMessage | Connected:
        """Waits for the next message and returns it."""


class NodeConnections(Protocol):
    """A controller's connections to the agents of all nodes."""

    def send(self, node: str, message: AnyMessage) -> None:
        """Sends a message; drops it if there is no connection to the node. Never blocks."""

    async def receive(self) -> Arrival:
        """Waits for the next message of any node and returns it."""

    def more(self) -> Arrival | None:
        """Returns the next message without waiting; None if none has arrived, or the transport cannot tell."""

    def refuse(self, node: str, why: str) -> None:
        """Closes the connection to a node that has broken the protocol."""


@runtime_checkable
class BundlingConnections(NodeConnections, Protocol):
    """A controller's connections to the agents of all nodes, held by relays."""

    @property
    def routes(self) -> Mapping[str, int]:
        """node -> the relay that holds its connection."""

    def send_bundles(self, bundles: Sequence[tuple[int, PacketBundle]]) -> None:
        """Sends each relay its bundles; drops those for a relay that has ended. Never blocks."""
