"""A socket between controller and relay: length-prefixed frames."""

from __future__ import annotations

import asyncio
import socket
import struct

_LENGTH = struct.Struct("<I")


class Pipe:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Pipe:
        """An end of a socket pair, which it owns from now on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def write(self, frame: bytes) -> None:
        """Writes a frame; never blocks. What the other end does not read is kept until it does, or has ended."""
        self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def read(self) -> bytes | None:
        """The next frame; None when the other end is closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Closes this end, after what was written."""
        self._writer.close()
