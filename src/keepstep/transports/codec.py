"""The wire form of messages: msgpack arrays, encoded by msgspec and tagged with the class name.

The decoder refuses unknown fields. No received message can run code.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import AnyMessage

MAX_MESSAGE_BYTES = 16 << 20
"""Limit of one message. `decode` refuses larger ones before it decodes them. State never travels in messages, so only
store values come near the limit."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in typing.get_args(AnyMessage)}
_PLACE = re.compile(r" - at `\$((?:\[\d+\])+)`$")
"""The place in an error of msgspec, by index: messages are arrays."""
MAX_UNPACKED = 4096
"""An error names no place in a list of more entries, so that a large message takes no memory to refuse."""


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
        raise RemoteProtocolError(f"not a message of this protocol: {_named(str(error), frame)}") from error


def _named(error: str, frame: bytes | bytearray | memoryview) -> str:
    """Returns an error of msgspec with the names of messages and fields in the place of indices."""
    if (found := _PLACE.search(error)) is None:
        return error
    place = _place(map(int, re.findall(r"\d+", found[1])), frame)
    return f"{place}: {error[: found.start()]}"


def _place(indices: Iterable[int], frame: bytes | bytearray | memoryview) -> str:
    place, inner = "", msgspec.Raw(bytes(frame))
    for index in indices:
        parts = _parts(inner)
        kind = _KINDS.get(_tag(parts[0])) if parts else None
        is_field = kind is not None and 0 < index <= len(kind.__struct_fields__)
        place += f" {kind.__name__}.{kind.__struct_fields__[index - 1]}" if kind and is_field else f"[{index}]"
        inner = parts[index] if index < len(parts) else msgspec.Raw(b"")
    return place.strip()


def _parts(data: msgspec.Raw) -> list[msgspec.Raw]:
    """Returns the encoded entries of an array; none if there are more than `MAX_UNPACKED`, or if it is malformed."""
    head = bytes(memoryview(data)[:3])
    is_short = head[:1] >= b"\x90" and head[:1] <= b"\x9f"  # up to 15 entries, in this byte
    if not is_short and not (head[:1] == b"\xdc" and int.from_bytes(head[1:]) <= MAX_UNPACKED):  # in the next two
        return []
    try:
        return msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):  # the error was found before the end of the frame
        return []


def _tag(data: msgspec.Raw) -> str:
    try:
        return msgspec.msgpack.decode(data, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
