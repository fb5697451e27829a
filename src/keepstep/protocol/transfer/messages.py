"""The messages of a transfer, and their encoding.

There are three roles. A *device* is a process that holds weights, one per rank; it is the source of its own blocks and
forwards others. The *coordinator* is the device of rank 0, and decides whether an update is committed. A *subscriber*
is a consumer, attached to one device. As everywhere, reports are named in the past tense and no received message can
run code. Bytes of tensors never travel in messages.

Each update has a number, unique on its connection and ascending; a message of an earlier one is dropped.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol.transfer.layout import Consumer, HeldPart, Layout, Want

MAX_BODY_BYTES = 256 << 20
"""A layout takes about 150 bytes for each tensor and each part of one; what claims more is refused unread."""


class TransferFault(enum.StrEnum):
    """Of what kind it is that an update did not come about."""

    LOST = "lost"
    """A device is gone or stands still."""
    LAYOUT = "layout"
    """The tensors do not fit together; the next four say more of it, as `keepstep.protocol.transfer.layout.Misfit`."""
    UNKNOWN = "unknown"
    PART = "part"
    SHAPE = "shape"
    DTYPE = "dtype"
    STALE = "stale"
    """A device is of another generation, or publishes another version."""
    CHECKSUM = "checksum"
    """A consumer has other bytes than were sent."""


class TransferMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """The root of all messages of a transfer."""


# ---- introductions: who opens a connection says what it is for ------------------------------------------------------


class DeviceCalled(TransferMessage, frozen=True):
    """A device opens a line to another, to read what that one sends in this and later updates."""

    rank: int
    generation: int


class UpdateOffered(TransferMessage, frozen=True):
    """A device is ready to publish a version: what it holds, and who is attached to it.

    It opens a line to the coordinator, which is for this one update: what one update leaves on it meets no other.
    """

    rank: int
    generation: int
    version: int
    last_update: int
    """The highest number of an update that this device has seen."""
    held: tuple[HeldPart, ...]
    consumers: tuple[Consumer, ...]
    holds: tuple[int | None, ...]
    """By consumer: the version that it has whole and keeps, so that what has not changed need not come again."""


class CatchUpCalled(TransferMessage, frozen=True):
    """A device asks another for its part of what was published last, for a consumer that came late."""

    rank: int
    generation: int
    update: int
    version: int
    layout: Layout


class FarCalled(TransferMessage, frozen=True):
    """A device wants to reach a rank that is on another node; said to the process that stands in for it on this one."""

    rank: int
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled


class ProxyCalled(TransferMessage, frozen=True):
    """A process that stands in for consumers of other nodes: what is said to them goes over this connection, once."""

    name: str
    """Its own; a newer one of the same name takes its place."""


class Proxied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer of another node, as the process that stands in for it knows it."""

    proxy: str
    number: int
    """Among the consumers of this proxy."""


class SubscriberCalled(TransferMessage, frozen=True):
    """A consumer attaches itself to a device."""

    name: str
    wants: tuple[Want, ...] | None
    generation: int
    """The highest it has heard of."""
    version: int | None
    """What it has."""
    delta: bool
    """It keeps what it has, and need not get it again."""
    proxied: Proxied | None
    """Set if it is on another node: the device says over its proxy's connection what it has to say to it."""


class GpuMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How another process of this node finds memory of a GPU: what CUDA's interprocess calls and torch want to know."""

    gpu: str
    """Its UUID: processes may number their GPUs differently."""
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_wait: bool


class BufferPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A buffer of slots in memory that others may read."""

    num_slots: int
    slot_bytes: int
    gpu: GpuMemory | None
    """None: it is a memory file, whose descriptor comes with the message."""


class Welcomed(TransferMessage, frozen=True):
    """The line stands. A reader or subscriber is told where the buffer is."""

    rank: int
    generation: int
    buffer: BufferPlace | None


class Refused(TransferMessage, frozen=True):
    """The line ends here, and why; ``stale`` if it is because the caller's generation is over."""

    reason: str
    stale: bool


# ---- device and coordinator -----------------------------------------------------------------------------------------


class UpdateAgreed(TransferMessage, frozen=True):
    """All devices have offered the same version: this is the layout."""

    update: int
    version: int
    generation: int
    layout: Layout
    holds: tuple[int | None, ...]
    """By reader, as the devices have offered."""


class MovementSeen(TransferMessage, frozen=True):
    """Buckets have moved on this device since it said so last."""

    update: int


class StillThere(TransferMessage, frozen=True):
    """Nothing has moved here, but the device is there and waits."""


class DevicePrepared(TransferMessage, frozen=True):
    """Everything has been sent and received here, and every consumer that is still there has all of it."""

    update: int


class DeviceFailed(TransferMessage, frozen=True):
    """This device cannot go on, and who seems to be to blame."""

    update: int
    culprit: str
    reason: str
    stalled: bool
    """It was only that nothing came from there, which may be another device's fault."""


class VersionCommitted(TransferMessage, frozen=True):
    """The version counts."""

    update: int
    version: int


class UpdateAborted(TransferMessage, frozen=True):
    """The update does not count, and who is to blame. ``update`` is 0 while it was not agreed on."""

    update: int
    fault: TransferFault
    culprit: str
    reason: str


# ---- the owner of a buffer, and its readers -------------------------------------------------------------------------


class BucketReady(TransferMessage, frozen=True):
    """A bucket lies in a slot of the sender's buffer."""

    update: int
    bucket: int
    slot: int
    num_bytes: int
    """Of the bucket and its checksum, from the beginning of the slot."""


class BucketUnchanged(TransferMessage, frozen=True):
    """A bucket has the content that it had in the version which the readers have: it does not come."""

    update: int
    bucket: int
    checksum: bytes


class SlotFreed(TransferMessage, frozen=True):
    """The reader has taken what it needs from the slot."""

    update: int
    slot: int


# ---- device and subscriber ------------------------------------------------------------------------------------------


class BufferShared(TransferMessage, frozen=True):
    """Buckets may lie in another buffer, too. It takes the place of one that had the same numbers before."""

    first_slot: int
    """Number of its first slot for this subscriber; the slots of the buffer in `Welcomed` count from 0."""
    place: BufferPlace


class UpdateBegan(TransferMessage, frozen=True):
    """An update comes; the subscriber is the reader of this index in its layout."""

    update: int
    version: int
    generation: int
    layout: Layout
    reader: int
    base: int | None
    """The version that the subscriber has; what has not changed since does not come."""


class ProxiedReader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer of a proxy that takes part in an update; see `UpdateBegan`."""

    number: int
    reader: int
    base: int | None


class UpdateBeganFor(TransferMessage, frozen=True):
    """An update comes for these consumers of a proxy. `BucketReady` and `BucketUnchanged` are for all of them then."""

    update: int
    version: int
    generation: int
    layout: Layout
    members: tuple[ProxiedReader, ...]


Notice: TypeAlias = VersionCommitted | UpdateAborted | MovementSeen
"""What several consumers are told alike."""


class SaidTo(TransferMessage, frozen=True):
    """A notice to these consumers of a proxy."""

    numbers: tuple[int, ...]
    notice: Notice


ToProxied: TypeAlias = UpdateBeganFor | SaidTo | BucketUnchanged
"""What a proxy passes on to consumers that it stands in for."""


class VersionLoaded(TransferMessage, frozen=True):
    """The subscriber has the whole version, every checksum was right."""

    update: int
    checksum: bytes
    """Of all its buckets together, also of those that have not come."""
    reloads: tuple[tuple[int, int, int], ...]
    """When it was busy with the first buckets: bucket, begin and end in nanoseconds on its monotonic clock. For the
    eye only."""


class VersionTaken(TransferMessage, frozen=True):
    """The version is what the subscriber's weights are from now on."""

    update: int


class LoadFailed(TransferMessage, frozen=True):
    """The subscriber cannot take this update, and why; it stays attached."""

    update: int
    reason: str


class PathLost(TransferMessage, frozen=True):
    """The process at the other end is on another node and cannot be reached any more, and why. The last message."""

    reason: str


AnyTransferMessage: TypeAlias = (
    DeviceCalled
    | CatchUpCalled
    | FarCalled
    | ProxyCalled
    | SubscriberCalled
    | Welcomed
    | Refused
    | UpdateOffered
    | UpdateAgreed
    | MovementSeen
    | StillThere
    | DevicePrepared
    | DeviceFailed
    | VersionCommitted
    | UpdateAborted
    | BucketReady
    | BucketUnchanged
    | SlotFreed
    | BufferShared
    | UpdateBegan
    | UpdateBeganFor
    | SaidTo
    | VersionLoaded
    | VersionTaken
    | LoadFailed
    | PathLost
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyTransferMessage] = msgspec.msgpack.Decoder(AnyTransferMessage)


def encode(message: AnyTransferMessage) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(body: bytes) -> AnyTransferMessage:
    """The message in ``body``.

    Raises:
        RemoteProtocolError: there is none.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigurationError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message of a transfer: {error}") from error
