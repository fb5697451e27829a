"""The protocol between a relay and the controller.

The relay sends an `Upward` frame and then waits for the `Downward` frame that acknowledges it. Meanwhile it collects
packets: so bundles grow with the load, and no timer is needed.

Orders to all ranks are large, because they may contain the membership. The controller encodes them once for all relays,
and a relay copies them into its packets without decoding them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.relay.bundle import Item, NodeSaid, PacketBundle
from keepstep.protocol.transfer.directory import PublishingNode


class Begin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a controller: the settings of a relay.

    ``key`` and ``certificate`` are None without TLS. ``term`` is the term of the controller's lease.
    """

    host: str
    port: int
    secret: str
    key: bytes | None
    certificate: bytes | None
    term: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The relay listens for agents."""


class ConnectionRefused(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The relay has refused a connection."""

    address: str
    why: str


class WeightsAnnounced(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """A node that publishes weights has announced its address to the relay."""

    node: PublishingNode


class Upward(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Messages of a relay's agents since its last frame. An empty frame is a sign of life."""

    items: tuple[Item, ...]


class EncodedBundle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `PacketBundle` of orders, with its messages in the wire form of a packet."""

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]
    firsts: tuple[int, ...]
    received: tuple[int, ...]
    messages: msgspec.Raw

    def packets(self) -> Iterator[tuple[str, bytes]]:
        """Yields each node with its packet, in the wire form of `keepstep.transports.codec`."""
        rows = zip(self.nodes, self.incarnations, self.firsts, self.received, strict=True)
        for node, incarnation, first, received in rows:
            yield node, _encoder.encode(_EncodedPacket(node, incarnation, first, received, self.messages, misses=False))


class Downward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages that a relay must send. ``has_taken``: the controller has taken the relay's last frame."""

    has_taken: bool
    bundles: tuple[EncodedBundle, ...]
    others: tuple[NodeSaid, ...]
    refused: tuple[tuple[str, str], ...]
    """(node, reason) of each connection that the relay must close."""
    publishing: tuple[PublishingNode, ...]
    """Nodes that have announced to other relays that they publish weights."""


class _EncodedPacket(msgspec.Struct, frozen=True, tag="Packet", array_like=True):
    """`keepstep.protocol.messages.Packet` with its messages encoded."""

    node: str
    incarnation: int
    first: int
    received: int
    messages: msgspec.Raw
    misses: bool


Frame = TypeVar("Frame")
FromRelay = Upward | Ready | ConnectionRefused | WeightsAnnounced

_encoder = msgspec.msgpack.Encoder()
_upward: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)
_begin = msgspec.msgpack.Decoder(Begin)
_downward = msgspec.msgpack.Decoder(Downward)


def encode(frame: FromRelay | Downward | Begin) -> bytes:
    """Returns the wire form of a frame."""
    return _encoder.encode(frame)


def decode_upward(data: bytes) -> FromRelay:
    """Decodes a frame of a relay.

    Raises:
        RemoteProtocolError: the data is no such frame.
    """
    return _decoded(_upward, data)


def decode_begin(data: bytes) -> Begin:
    """Decodes the first frame of a controller.

    Raises:
        RemoteProtocolError: the data is no such frame.
    """
    return _decoded(_begin, data)


def decode_downward(data: bytes) -> Downward:
    """Decodes a later frame of a controller.

    Raises:
        RemoteProtocolError: the data is no such frame.
    """
    return _decoded(_downward, data)


def _decoded(decoder: msgspec.msgpack.Decoder[Frame], data: bytes) -> Frame:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a frame between relay and controller: {error}") from error


def encoded_bundles(bundles: Iterable[PacketBundle]) -> list[EncodedBundle]:
    """Encodes bundles of orders. It encodes messages that several bundles share only once."""
    known: dict[int, tuple[Sequence[object], msgspec.Raw]] = {}
    found = []
    for bundle in bundles:
        messages = bundle.messages
        if id(messages) not in known:
            known[id(messages)] = messages, msgspec.Raw(_encoder.encode(messages))
        numbers = bundle.nodes, bundle.incarnations, bundle.firsts, bundle.received
        found.append(EncodedBundle(*numbers, known[id(messages)][1]))
    return found
