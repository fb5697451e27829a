"""Frames on a byte stream: a 4-byte little-endian length, then one message. Sans-IO: bytes in, messages out."""

from __future__ import annotations

import struct

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.codec import MAX_MESSAGE_BYTES, decode, encode

_LENGTH = struct.Struct("<I")


def frame(message: AnyMessage) -> bytes:
    """The bytes of one message, ready to be written."""
    return framed(encode(message))


def framed(body: bytes) -> bytes:
    """The same for a message in its wire form."""
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages. One per connection; not safe for several threads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """How many bytes have come of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[AnyMessage]:
        """The messages completed by ``data``.

        Raises:
            RemoteProtocolError: a frame is larger than allowed (found before it has arrived), or no message.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"a frame of {length} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages
