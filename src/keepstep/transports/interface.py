"""The interface between agents and controller on one side, and what carries their messages on the other.

A connection promises one thing: as long as it lasts, what arrives is what was sent, in order. Messages that must
arrive are repeated by `keepstep.protocol.reliable_channel`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from keepstep.protocol.messages import AnyMessage

PATIENCE_S = 600.0
"""As long as a script may take between two steps: workers that end a step need the controller no later than then."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """The connection is open, for the first time or again: what was sent before may have been lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a node, over a connection that is known to be that node's."""

    node: str
    message: AnyMessage | Connected


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
