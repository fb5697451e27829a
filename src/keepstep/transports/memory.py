"""A message channel inside one process, for an embedded controller and its agent, and for tests."""

from __future__ import annotations

import asyncio

from keepstep.errors import InternalError
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.codec import decode, encode
from keepstep.transports.interface import Arrival


class MemoryChannel:
    """One end of the channel. It encodes and decodes messages, so that the two ends share no objects."""

    def __init__(self, inbox: asyncio.Queue[bytes], outbox: asyncio.Queue[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: AnyMessage) -> None:
        """Queues a message for the other end. Never blocks."""
        self._outbox.put_nowait(encode(message))

    async def receive(self) -> AnyMessage:
        """Waits for the next message from the other end and returns it."""
        return decode(await self._inbox.get())


class OneNode:
    """The controller's end if there is one node, in the controller's own process. Implements `NodeConnections`."""

    def __init__(self, node: str, channel: MemoryChannel) -> None:
        self._node = node
        self._channel = channel

    def send(self, node: str, message: AnyMessage) -> None:
        """Queues a message; drops it if it is for another node."""
        if node == self._node:
            self._channel.send(message)

    async def receive(self) -> Arrival:
        """Waits for the next message of the node and returns it."""
        return Arrival(self._node, await self._channel.receive())

    def more(self) -> Arrival | None:
        """Returns None: a single node sends so few messages that the controller need not handle them together."""
        return None

    def refuse(self, node: str, why: str) -> None:
        """Raises an error, because both ends are keepstep's own code in one process.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"the agent of {node} broke the protocol: {why}")


def channel_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Returns two connected ends."""
    left: asyncio.Queue[bytes] = asyncio.Queue()
    right: asyncio.Queue[bytes] = asyncio.Queue()
    return MemoryChannel(left, right), MemoryChannel(right, left)
