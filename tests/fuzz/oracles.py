"""What must hold of every decoder, whatever it is given. Each check raises `AssertionError` where it does not.

They keep their own idea of what a stream of frames is, and of what msgpack says, and compare: so a decoder that loses,
invents or confuses something is found as well as one that raises what it must not.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.controller import JournalEntry, ReportsReceived
from keepstep.protocol.messages import AnyMessage, Packet
from keepstep.protocol.transfer import messages as transfer
from keepstep.transports import codec
from keepstep.transports.codec import MAX_MESSAGE_BYTES
from keepstep.transports.framing import FrameDecoder
from keepstep.transports.rpc.wire import messages_in

_journal = msgspec.json.Decoder(JournalEntry)


class Decoder(Protocol):
    """What `FrameDecoder` offers."""

    num_buffered: int

    def feed(self, data: bytes) -> list[AnyMessage]:
        """The messages completed by ``data``."""


@dataclasses.dataclass(slots=True)
class Tally:
    """How much was looked at; a fuzz that meets nothing but refusals has looked at little."""

    num_frames: int = 0
    num_messages: int = 0
    num_refused: int = 0


def check_body(body: bytes) -> bool:
    """One message of a job; returns whether it is one."""
    return _check(body, codec.decode, codec.encode)


def check_transfer(body: bytes) -> bool:
    """One message of a transfer of weights; returns whether it is one."""
    return _check(body, transfer.decode, transfer.encode)


def _check(body: bytes, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> bool:
    try:
        message = decode(body)
    except RemoteProtocolError:
        return False
    said = msgspec.msgpack.decode(body)
    again = encode(message)
    assert decode(again) == message, "what was decoded comes back as something else"
    assert type(message).__name__ == said[0], "it was taken for another message"
    assert _is_same(said, msgspec.msgpack.decode(again)), "something was lost or invented"
    if isinstance(message, Packet):
        entry = JournalEntry(0.0, ReportsReceived(message.node, message.incarnation, message.messages))
        assert _journal.decode(msgspec.json.encode(entry)) == entry, "the journal cannot hold it"
    return True


def _is_same(said: Any, understood: Any) -> bool:
    """Whether two values of msgpack mean the same; a float may have been sent as an integer."""
    if isinstance(said, list) and isinstance(understood, list):
        return len(said) == len(understood) and all(map(_is_same, said, understood))
    if isinstance(understood, float):
        return isinstance(said, int | float) and float(said) == understood
    return type(said) is type(understood) and said == understood


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a stream of frames holds."""

    bodies: tuple[bytes, ...]
    """Of the whole frames, up to the first that is none."""
    is_refused: bool
    num_left: int
    """Bytes of a frame that is not whole."""


def reading(stream: bytes) -> Reading:
    """Cuts a stream into frames, slowly and in the plainest way."""
    bodies, at = [], 0
    while len(stream) - at >= 4:
        (size,) = struct.unpack_from("<I", stream, at)
        if size > MAX_MESSAGE_BYTES:
            return Reading(tuple(bodies), True, 0)
        if len(stream) - at - 4 < size:
            break
        body = stream[at + 4 : at + 4 + size]
        at += 4 + size
        if not check_body(body):
            return Reading(tuple(bodies), True, 0)
        bodies.append(body)
    return Reading(tuple(bodies), False, len(stream) - at)


def check_stream(pieces: Sequence[bytes], tally: Tally, new_decoder: Callable[[], Decoder] = FrameDecoder) -> None:
    """A stream that arrives in pieces: the messages that are in it, or a refusal, and nothing kept beyond."""
    found = reading(b"".join(pieces))
    tally.num_frames += len(found.bodies) + found.is_refused + (found.num_left > 0)
    tally.num_messages += len(found.bodies)
    tally.num_refused += found.is_refused
    _check_feeding(pieces, found, new_decoder())
    try:
        at_once = messages_in(b"".join(pieces))
    except RemoteProtocolError:
        assert found.is_refused or found.num_left, "whole frames were refused"
    else:
        assert not found.is_refused, "a call with something that is no message was let in"
        assert not found.num_left, "a call with half a frame was let in"
        _expect(at_once, found.bodies)


def _check_feeding(pieces: Iterable[bytes], found: Reading, decoder: Decoder) -> None:
    received: list[AnyMessage] = []
    for piece in pieces:
        try:
            received += decoder.feed(piece)
        except RemoteProtocolError:
            assert found.is_refused, "a stream of whole messages was refused"
            _expect(received, found.bodies[: len(received)])
            return
        assert decoder.num_buffered <= 4 + MAX_MESSAGE_BYTES, "more is kept than the largest frame"
    assert not found.is_refused, "something that is no message was let in"
    assert decoder.num_buffered == found.num_left, "bytes were lost, or kept"
    _expect(received, found.bodies)


def _expect(received: Sequence[AnyMessage], bodies: Sequence[bytes]) -> None:
    assert list(received) == [codec.decode(body) for body in bodies], "other messages came out than were sent"
