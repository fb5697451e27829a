"""The connection between controller and relay: length-prefixed frames on a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")


class Pipe:
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Pipe:
        """Opens a pipe over one end of a socket pair, which it owns from then on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def write(self, frame: bytes) -> None:
        """Writes a frame. Never blocks: it buffers what the other end has not read yet, without a limit."""
        self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def read(self) -> bytes | None:
        """Waits for the next frame and returns it; None when the other end is closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Closes this end after all written frames are sent."""
        self._writer.close()
