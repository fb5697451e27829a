"""Frames on a byte stream: a 4-byte little-endian length, then one message. Sans-IO: bytes in, messages out."""

from __future__ import annotations

import struct
from pathlib import Path

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.codec import MAX_MESSAGE_BYTES, decode, encode

_LENGTH = struct.Struct("<I")


def frame(message: AnyMessage) -> bytes:
    """Returns a message as a frame."""
    return framed(encode(message))


def framed(body: bytes) -> bytes:
    """Returns a message that is already encoded as a frame."""
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream into messages. Each connection needs its own; it is not thread-safe."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def num_buffered(self) -> int:
        """Number of bytes of an incomplete frame that have arrived."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[AnyMessage]:
        """Adds data of the stream, and returns the messages that it completes.

        Raises:
            RemoteProtocolError: a frame is too large (raised before it has arrived), or it contains no message.
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


def messages_in(path: Path) -> list[AnyMessage]:
    """Returns the messages of a file of frames, none if it does not exist. Ignores an incomplete last frame.

    Raises:
        ConfigurationError: it cannot be read, or a frame contains no message: another version has written it.
    """
    try:
        return FrameDecoder().feed(path.read_bytes()) if path.exists() else []
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except RemoteProtocolError as error:
        raise ConfigurationError(not_ours(path, str(error))) from error


def not_ours(path: Path, what: str) -> str:
    """Returns the sentence that refuses a file of a run with something in it that this version does not write."""
    return f"{path}: {what}. Another version of keepstep has written the file: continue with that one, or it is damaged"
