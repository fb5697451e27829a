"""The wire form of messages: msgpack arrays, encoded by msgspec and tagged with the class name.

The decoder refuses unknown fields. No received message can run code.
"""

from __future__ import annotations

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AnyMessage

MAX_MESSAGE_BYTES = 16 << 20
"""Limit of one message. `decode` refuses larger ones before it decodes them. State never travels in messages, so only
store values come near the limit."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Returns the wire form of a message."""
    return _encoder.encode(message)


def decode(frame: bytes | bytearray | memoryview) -> AnyMessage:
    """Decodes the message in a frame.

    Raises:
        RemoteProtocolError: the frame is too large, not msgpack, or not a message of this protocol.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a message of this protocol: {error}") from error
