"""The messages of a transfer of weights, and their encoding.

There are three roles. A *device* is a process that holds weights, one per rank. It is the source of its own blocks and
forwards the blocks of others. The *coordinator* is the device of rank 0, and decides whether an update is committed. A
*subscriber* is a consumer that is attached to one device. No received message can run code. Bytes of tensors never
travel in messages.

Each update has a number, which is unique on a connection and ascending. Receivers drop messages of an earlier update.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.protocol.transfer.layout import Consumer, HeldPart, Layout, Want

MAX_BODY_BYTES = 256 << 20
"""Limit of one message. A receiver refuses a larger one unread. A layout takes about 150 bytes for each tensor and each
part of a tensor."""


class TransferFault(enum.StrEnum):
    """The kinds of failures of an update."""

    LOST = "lost"
    """A device is gone, or makes no progress."""
    LAYOUT = "layout"
    """The tensors do not fit together. The next four kinds are more specific; see
    `keepstep.protocol.transfer.layout.Misfit`."""
    UNKNOWN = "unknown"
    PART = "part"
    SHAPE = "shape"
    DTYPE = "dtype"
    STALE = "stale"
    """A device is of another generation, or publishes another version."""
    CHECKSUM = "checksum"
    """A consumer has received other bytes than were sent."""


class TransferMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """Base class of all messages of a transfer."""


# ---- introductions: the first message of a connection says what it is for -------------------------------------------


class DeviceCalled(TransferMessage, frozen=True):
    """A device connects to another device, to read what that device sends in this and later updates."""

    rank: int
    generation: int


class UpdateOffered(TransferMessage, frozen=True):
    """A device offers a version to the coordinator: what it holds, and which consumers are attached to it.

    The device opens a new connection for each update, so that a later update finds no messages of an earlier one.
    """

    rank: int
    generation: int
    version: int
    last_update: int
    """The highest update number that this device has seen."""
    held: tuple[HeldPart, ...]
    consumers: tuple[Consumer, ...]
    holds: tuple[int | None, ...]
    """For each consumer the complete version that it keeps, so that unchanged buckets need not be sent; None: none."""


class CatchUpCalled(TransferMessage, frozen=True):
    """A device asks another device for its part of the last version, for a consumer that has attached late."""

    rank: int
    generation: int
    update: int
    version: int
    layout: Layout


class FarCalled(TransferMessage, frozen=True):
    """A device wants to reach a rank on another node. It sends this to the rank's proxy process on its own node."""

    rank: int
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled


class ProxyCalled(TransferMessage, frozen=True):
    """A proxy for consumers on other nodes connects. The device sends a message for several of them once, over this
    connection."""

    name: str
    """The proxy's name. A newer proxy with the same name replaces it."""


class Proxied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The proxy of a consumer on another node, and the consumer's number there."""

    proxy: str
    number: int
    """The consumer's number among the consumers of this proxy."""


class SubscriberCalled(TransferMessage, frozen=True):
    """A consumer attaches to a device."""

    name: str
    wants: tuple[Want, ...] | None
    generation: int
    """The highest generation that the consumer knows."""
    version: int | None
    """The version that the consumer has; None if it has none."""
    delta: bool
    """Whether the consumer keeps its version, so that unchanged buckets need not be sent."""
    proxied: Proxied | None
    """Set if the consumer is on another node. The device then sends messages over the proxy's connection."""


class GpuMemory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The handle of GPU memory for another process of this node: the arguments of CUDA IPC and torch."""

    gpu: str
    """The GPU's UUID, because processes may number their GPUs differently."""
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    must_wait: bool


class BufferPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A buffer of slots in memory that other processes read."""

    num_slots: int
    slot_bytes: int
    gpu: GpuMemory | None
    """None: the buffer is a memory file, whose descriptor comes with the message."""


class Welcomed(TransferMessage, frozen=True):
    """The device accepts the connection. A reader or subscriber gets the place of the buffer."""

    rank: int
    generation: int
    buffer: BufferPlace | None


class Refused(TransferMessage, frozen=True):
    """The device refuses the connection. ``stale``: because the caller's generation is over."""

    reason: str
    stale: bool


# ---- device and coordinator -----------------------------------------------------------------------------------------


class UpdateAgreed(TransferMessage, frozen=True):
    """All devices have offered the same version. The update begins with this layout."""

    update: int
    version: int
    generation: int
    layout: Layout
    holds: tuple[int | None, ...]
    """For each reader of the layout, the version that it keeps, as the devices have offered."""


class MovementSeen(TransferMessage, frozen=True):
    """Buckets have moved on this device since its last such report."""

    update: int


class StillThere(TransferMessage, frozen=True):
    """A sign of life: no bucket has moved, and the device waits for others."""


class DevicePrepared(TransferMessage, frozen=True):
    """The device has sent and received everything, and all its attached consumers have all their buckets."""

    update: int


class DeviceFailed(TransferMessage, frozen=True):
    """This device cannot continue. ``culprit`` is the process that seems to be at fault."""

    update: int
    culprit: str
    reason: str
    stalled: bool
    """Whether the culprit was only silent, which may be another device's fault."""


class VersionCommitted(TransferMessage, frozen=True):
    """The version is committed."""

    update: int
    version: int


class UpdateAborted(TransferMessage, frozen=True):
    """The update is aborted. ``culprit`` is the process at fault. ``update`` is 0 if the devices had not agreed yet."""

    update: int
    fault: TransferFault
    culprit: str
    reason: str


# ---- the owner of a buffer, and its readers -------------------------------------------------------------------------


class BucketReady(TransferMessage, frozen=True):
    """A bucket is in a slot of the sender's buffer."""

    update: int
    bucket: int
    slot: int
    num_bytes: int
    """Size of the bucket with its checksum, from the start of the slot."""


class BucketUnchanged(TransferMessage, frozen=True):
    """A bucket has not changed since the version that the readers have, and is not sent."""

    update: int
    bucket: int
    checksum: bytes


class SlotFreed(TransferMessage, frozen=True):
    """The reader has copied what it needs from the slot."""

    update: int
    slot: int


# ---- device and subscriber ------------------------------------------------------------------------------------------


class BufferShared(TransferMessage, frozen=True):
    """Buckets may also be in another buffer. It replaces a former buffer with the same slot numbers."""

    first_slot: int
    """Number of its first slot for this subscriber. The slots of the buffer in `Welcomed` count from 0."""
    place: BufferPlace


class UpdateBegan(TransferMessage, frozen=True):
    """An update begins. ``reader`` is the subscriber's index among the readers of the layout."""

    update: int
    version: int
    generation: int
    layout: Layout
    reader: int
    base: int | None
    """The version that the subscriber has. Buckets that have not changed since are not sent."""


class ProxiedReader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer of a proxy that takes part in an update; see `UpdateBegan`."""

    number: int
    reader: int
    base: int | None


class UpdateBeganFor(TransferMessage, frozen=True):
    """An update begins for these consumers of a proxy. `BucketReady` and `BucketUnchanged` are then for all of them."""

    update: int
    version: int
    generation: int
    layout: Layout
    members: tuple[ProxiedReader, ...]


Notice: TypeAlias = VersionCommitted | UpdateAborted | MovementSeen
"""Messages that several consumers get with the same content."""


class SaidTo(TransferMessage, frozen=True):
    """A notice to these consumers of a proxy."""

    numbers: tuple[int, ...]
    notice: Notice


ToProxied: TypeAlias = UpdateBeganFor | SaidTo | BucketUnchanged
"""Messages that a proxy passes to its consumers."""


class VersionLoaded(TransferMessage, frozen=True):
    """The subscriber has the complete version, and every checksum was right."""

    update: int
    checksum: bytes
    """Checksum of all its buckets together, including unchanged ones."""
    reloads: tuple[tuple[int, int, int], ...]
    """(bucket, begin, end) of its work on the first buckets, in ns on its monotonic clock. For display only."""


class VersionTaken(TransferMessage, frozen=True):
    """The subscriber uses the version from now on."""

    update: int


class LoadFailed(TransferMessage, frozen=True):
    """The subscriber cannot load this update. It stays attached."""

    update: int
    reason: str


class PathLost(TransferMessage, frozen=True):
    """The process at the other end is on another node, and no longer reachable. The last message of a connection."""

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
    """Returns the message as bytes."""
    return _encoder.encode(message)


def decode(body: bytes) -> AnyTransferMessage:
    """Decodes the message in ``body``.

    Raises:
        RemoteProtocolError: ``body`` is no message of a transfer.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigurationError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message of a transfer: {error}") from error
