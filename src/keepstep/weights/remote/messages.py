"""The messages between two nodes on a link, and their encoding.

A *link* joins two nodes: the *feeder*, which is closer to the publishers, and the *fed* node. A link carries *tunnels*.
A tunnel is the connection of one consumer to its device, as `keepstep.protocol.transfer.messages` defines it. The fed
node numbers the tunnels. A message from a device to several consumers goes over a link once, with the numbers of their
tunnels. The contents of buckets go over connections of their own (`keepstep.weights.remote.link`). A bucket goes over
a link once, however many tunnels want it.

If several nodes have publishers, there is a link of the same kind between each two of them. Its tunnels are connections
between devices.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol.transfer.messages import (
    MAX_BODY_BYTES,
    AnyTransferMessage,
    BucketReady,
    CatchUpCalled,
    DeviceCalled,
    SubscriberCalled,
    ToProxied,
    UpdateOffered,
    Welcomed,
)

VERSION = 4
"""Version of this protocol. A node with another version is refused."""
MAX_GREETING_BYTES = 8192
"""Limit for a message from a caller that has not authenticated yet."""
MAX_MESSAGE_BYTES = MAX_BODY_BYTES
LENGTH = struct.Struct("<I")
BUCKET_HEADER = struct.Struct("<QQQQ")
"""Header of each stripe on a stream: number of messages sent before it on the link, update, bucket, bucket's size."""


class LinkMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """The base class of all messages on a link."""


# ---- opening a link -------------------------------------------------------------------------------------------------


class Greeting(LinkMessage, frozen=True):
    """The caller's first message on a connection."""

    protocol: int
    name: str
    """Name of the caller's node."""
    nonce: bytes
    session: bytes
    """Session id: empty on the first connection of a link; on a stream, the id from `Accepted`."""
    num_streams: int
    address: str | None
    """Address at which the caller can feed other nodes; None if it feeds none."""
    avoid: tuple[str, ...]
    """Feeders that the caller could not reach or has lost."""
    publishes: bool
    """Whether the caller has publishers, too. Its tunnels are then connections of devices."""


class Challenge(LinkMessage, frozen=True):
    """The answer to a `Greeting`, with a proof that the sender has the job's secret."""

    nonce: bytes
    proof: bytes


class Proven(LinkMessage, frozen=True):
    """The caller's proof that it has the token of the node whose name it gave."""

    proof: bytes


class Accepted(LinkMessage, frozen=True):
    """The caller is accepted."""

    session: bytes
    feeder: str | None
    """Address of the node that will feed the caller; None: the sender will, and the caller opens the streams now."""


class Denied(LinkMessage, frozen=True):
    """The caller is refused."""

    reason: str


# ---- on an open link ------------------------------------------------------------------------------------------------


class TunnelOpened(LinkMessage, frozen=True):
    """A consumer on or behind the fed node wants to attach to the device."""

    tunnel: int
    introduction: SubscriberCalled


class DeviceTunnelOpened(LinkMessage, frozen=True):
    """A device on the caller's node wants to connect to a rank. There is no answer if the rank is not on this node."""

    tunnel: int
    rank: int
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled


class DeviceWelcomed(LinkMessage, frozen=True):
    """The answer of the requested rank. Buckets in its buffer are sent to the mirror of this number."""

    tunnel: int
    mirror: int
    answer: Welcomed


class BucketShipped(LinkMessage, frozen=True):
    """A device's announcement of a bucket. It is valid once the shipment has arrived, which is sent only once."""

    tunnel: int
    mirror: int
    shipment: int
    """Number of the shipment, ascending on a link."""
    ready: BucketReady


class TunnelSaid(LinkMessage, frozen=True):
    """A message on a tunnel, in either direction."""

    tunnel: int
    message: AnyTransferMessage


class TunnelsTold(LinkMessage, frozen=True):
    """A message from the device to several consumers. It identifies them by the numbers of their tunnels."""

    message: ToProxied


class TunnelEnded(LinkMessage, frozen=True):
    """The tunnel has ended, with the reason."""

    tunnel: int
    reason: str


class Alive(LinkMessage, frozen=True):
    """A sign of life."""

    bytes_per_s: float
    """Rate at which the sender received buckets in its latest update, in bytes/s; 0 before the first bucket."""


AnyLinkMessage: TypeAlias = (
    Greeting
    | Challenge
    | Proven
    | Accepted
    | Denied
    | TunnelOpened
    | DeviceTunnelOpened
    | DeviceWelcomed
    | BucketShipped
    | TunnelSaid
    | TunnelsTold
    | TunnelEnded
    | Alive
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyLinkMessage] = msgspec.msgpack.Decoder(AnyLinkMessage)


def encode(message: AnyLinkMessage) -> bytes:
    """Encodes a message."""
    return _encoder.encode(message)


def decode(body: bytes | bytearray) -> AnyLinkMessage:
    """Decodes a message.

    Raises:
        RemoteProtocolError: ``body`` is no valid message.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigurationError) as error:
        raise RemoteProtocolError(f"not a message of a link: {error}") from error
