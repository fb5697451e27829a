"""Two ends of a message channel inside one process: the embedded controller and its agent, and tests."""

from __future__ import annotations

import asyncio

from keepstep.errors import InternalError
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.codec import decode, encode
from keepstep.transports.interface import Arrival


class MemoryChannel:
    """One end. Messages are encoded and decoded on the way, so that both ends live as if apart."""

    def __init__(self, inbox: asyncio.Queue[bytes], outbox: asyncio.Queue[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, message: AnyMessage) -> None:
        """Queues a message for the other end; never blocks."""
        self._outbox.put_nowait(encode(message))

    async def receive(self) -> AnyMessage:
        """The next message from the other end."""
        return decode(await self._inbox.get())


class OneNode:
    """A controller's end where there is one node, in its own process."""

    def __init__(self, node: str, channel: MemoryChannel) -> None:
        self._node = node
        self._channel = channel

    def send(self, node: str, message: AnyMessage) -> None:
        """Queues a message; one for another node is dropped."""
        if node == self._node:
            self._channel.send(message)

    async def receive(self) -> Arrival:
        """The next message of the node."""
        return Arrival(self._node, await self._channel.receive())

    def more(self) -> Arrival | None:
        """Nothing: one node never says so much that it would have to be taken together."""
        return None

    def refuse(self, node: str, why: str) -> None:
        """There is no connection to refuse in one's own process: both ends are keepstep's.

        Raises:
            InternalError: always.
        """
        raise InternalError(f"the agent of {node} broke the protocol: {why}")


def channel_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected ends."""
    left: asyncio.Queue[bytes] = asyncio.Queue()
    right: asyncio.Queue[bytes] = asyncio.Queue()
    return MemoryChannel(left, right), MemoryChannel(right, left)
