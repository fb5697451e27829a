"""Two ends of a message channel inside one process: the embedded controller and its agent, and tests."""

from __future__ import annotations

import asyncio

from keepstep.protocol.messages import AnyMessage, decode, encode


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


def channel_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected ends."""
    left: asyncio.Queue[bytes] = asyncio.Queue()
    right: asyncio.Queue[bytes] = asyncio.Queue()
    return MemoryChannel(left, right), MemoryChannel(right, left)
