"""What two nodes say to each other on a link, and how it is encoded.

A *link* joins two nodes: the *feeder*, which is nearer to the publishers, and the *fed* one. It carries *tunnels*: each
is the connection of one consumer to its device, as `keepstep.protocol.transfer.messages` defines it, with a number of
the fed node's. What a device says to many consumers goes over a link once, with the numbers of their tunnels. Bucket
contents travel beside the messages, by the link's transport; a bucket goes over a link once, whatever the number of
tunnels that want it.

Where publishers are on several nodes, each of those has a link of the same kind from each other one. Its tunnels are
connections between devices.
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

TCP, NIXL = "tcp", "nixl"
"""Transports of buckets; see `keepstep.weights.remote.transports`."""
VERSION = 3
"""Of this protocol; a node that speaks another one is refused."""
MAX_GREETING_BYTES = 8192
"""Before a caller has proved who it is, no larger message is read from it."""
MAX_MESSAGE_BYTES = MAX_BODY_BYTES
LENGTH = struct.Struct("<I")
BUCKET_HEADER = struct.Struct("<QQQQ")
"""On a stream, before each stripe of a bucket: messages sent before on the link, update, bucket, its bytes."""


class LinkMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """The root of all messages of a link."""


# ---- opening a link -------------------------------------------------------------------------------------------------


class Greeting(LinkMessage, frozen=True):
    """The caller's first words on a connection."""

    protocol: int
    name: str
    """Of the caller's node."""
    nonce: bytes
    session: bytes
    """Empty on the first connection of a link; on a stream, what `Accepted` said."""
    num_streams: int
    address: str | None
    """Where other nodes can reach the caller to be fed; None: nowhere."""
    avoid: tuple[str, ...]
    """Feeders that the caller could not reach or has lost."""
    publishes: bool
    """The caller has publishers, too: its tunnels are those of devices."""
    transport: str
    """Of the link's buckets."""


class Challenge(LinkMessage, frozen=True):
    """The answer to a greeting, with a proof that the sender has the job's secret."""

    nonce: bytes
    proof: bytes


class Proven(LinkMessage, frozen=True):
    """The caller's proof that it has the token of the node whose name it gave."""

    proof: bytes


class Accepted(LinkMessage, frozen=True):
    """The caller is let in."""

    session: bytes
    feeder: str | None
    """The address of the node that feeds the caller; None: the sender does, on streams that the caller opens now."""


class Denied(LinkMessage, frozen=True):
    """The caller is not let in."""

    reason: str


# ---- on an open link ------------------------------------------------------------------------------------------------


class TunnelOpened(LinkMessage, frozen=True):
    """A consumer below wants to attach itself to the device."""

    tunnel: int
    introduction: SubscriberCalled


class DeviceTunnelOpened(LinkMessage, frozen=True):
    """A device of the caller's node wants to reach a rank; if that is not on the other node, no answer comes."""

    tunnel: int
    rank: int
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled


class DeviceWelcomed(LinkMessage, frozen=True):
    """The rank is there, and its answer. Buckets in its buffer come into the mirror of this number."""

    tunnel: int
    mirror: int
    answer: Welcomed


class BucketShipped(LinkMessage, frozen=True):
    """What a device says of a bucket. It holds as soon as the shipment, which goes over the link once, has come."""

    tunnel: int
    mirror: int
    shipment: int
    """Ascending on a link."""
    ready: BucketReady


class TunnelSaid(LinkMessage, frozen=True):
    """A consumer or device says something to its device, or that device to it."""

    tunnel: int
    message: AnyTransferMessage


class TunnelsTold(LinkMessage, frozen=True):
    """The device says something to several consumers; their numbers in it are those of their tunnels."""

    message: ToProxied


class TunnelEnded(LinkMessage, frozen=True):
    """Nothing more comes on the tunnel, and why."""

    tunnel: int
    reason: str


class MemoryShared(LinkMessage, frozen=True):
    """All memory of the sender from which the receiver may read by now; it replaces what was shared before."""

    metadata: bytes
    """As NIXL describes it to itself."""


class BucketOffered(LinkMessage, frozen=True):
    """A bucket lies in shared memory of the sender, until the receiver says that it has read it."""

    number: int
    """Of the offer; no other on the link has the same."""
    update: int
    bucket: int
    address: int
    """In the sender's process."""
    num_bytes: int


class BucketRead(LinkMessage, frozen=True):
    """The receiver has read what was offered, or does not want it any more."""

    number: int


class Alive(LinkMessage, frozen=True):
    """The sender is there."""

    bytes_per_s: float
    """How fast buckets came to the sender in its latest update; 0: none came yet."""


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
    | MemoryShared
    | BucketOffered
    | BucketRead
    | Alive
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyLinkMessage] = msgspec.msgpack.Decoder(AnyLinkMessage)


def encode(message: AnyLinkMessage) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(body: bytes | bytearray) -> AnyLinkMessage:
    """The message in ``body``.

    Raises:
        RemoteProtocolError: there is none.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigurationError) as error:
        raise RemoteProtocolError(f"not a message of a link: {error}") from error
