"""The work of one device in one update: two concurrent stages, each in its own thread.

The first stage copies the blocks of which this device is the source into the H2D buffer. The second stage forwards each
needed bucket to the consumers of this device. In host memory the consumers map the source's H2D buffer and get the
number of the slot; on GPUs the stage copies the bucket into this device's IPC buffer. The third stage, the reload, runs
in the consumers' processes (`keepstep.weights.subscriber`). Each stage waits for one slot or bucket at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import ChecksumMismatch, LoadError, PeerLost, RemoteProtocolError, SubscriberLost
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    BucketUnchanged,
    LoadFailed,
    TransferFault,
    UpdateAborted,
    VersionCommitted,
    VersionLoaded,
    VersionTaken,
)
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.channels.connection import Connection, ConnectionStalled, what_of
from keepstep.weights.channels.deltas import checksum_of_version
from keepstep.weights.channels.flow import Inlet, Outlet, Stalled
from keepstep.weights.device.source_connections import SourceBuffer
from keepstep.weights.device.subscriber_registry import Attached, tell
from keepstep.weights.memory.buffers import Buffer
from keepstep.weights.memory.copies import Copy, checksum_in, copy_of, seal
from keepstep.weights.memory.pieces import CHECKSUM_BYTES, Held
from keepstep.weights.spans import Span, Spans

DEVICE_PATIENCE_S = 0.2
"""Added to a consumer's deadline for a device that holds a slot. So a device that waits for its consumer drops the
consumer before it is itself taken for the culprit."""
SOURCE_PATIENCE_S = 0.45
"""Added to a consumer's deadline for a source that sends nothing: it may be waiting for a device to free a slot."""


SWITCH_PATIENCE_S = 0.2
"""Added to a consumer's deadline for its switch to a version: it may be waiting for users of its weights."""


class CannotGoOn(Exception):
    """The update must be aborted. ``culprit`` is the cause, or the suspect if it only ``stalled``."""

    def __init__(self, culprit: str, reason: str, stalled: bool = False) -> None:
        super().__init__(f"{culprit}: {reason}")
        self.culprit, self.reason, self.stalled = culprit, reason, stalled

    @classmethod
    def because_of(cls, rank: int, error: Exception) -> CannotGoOn:
        """The error for a failure of another device."""
        return cls(f"rank {rank}", what_of(error), isinstance(error, Stalled | ConnectionStalled))


class RankPlan:
    """One device's part of a plan."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        plan = layout.plan()
        self.own, self.coming = plan.sent_by(rank), plan.sent_to(rank)
        self.readers = tuple(index for index, reader in enumerate(layout.readers) if reader.device == rank)
        self._sizes = {bucket.index: bucket.num_bytes + CHECKSUM_BYTES for bucket in plan.buckets}
        self._tensors: dict[int, list[Held]] = {}
        self._gathers: dict[int, Copy] = {}

    def size_of(self, bucket: int) -> int:
        """How many bytes of a slot a bucket and its checksum take."""
        return self._sizes[bucket]

    def prepare(self, held: Sequence[Held]) -> None:
        """Sets the tensors to gather from.

        Args:
            held: this device's tensors, in the order in which it offered them.
        """
        casts = {cast.tensor: getattr(torch, cast.dtype) for cast in self.layout.casts}
        self._tensors = {}
        for part, own in zip(self.layout.holders[self.rank], held, strict=True):
            own = dataclasses.replace(own, travels_as=casts.get(part.tensor))
            self._tensors.setdefault(part.tensor, []).append(own)

    def gather(self, number: int, slot: torch.Tensor) -> bytes:
        """Gathers one of its own buckets, and returns the checksum.

        Args:
            number: index of the bucket in ``own``.
            slot: the destination; always the same one for a bucket.
        """
        if number not in self._gathers:  # kept for the next update
            self._gathers[number] = copy_of(slot, self.own[number], self._tensors)
        return self._gathers[number].gather()


class Announcing(Protocol):
    """Announces the slots of a buffer to their readers, and tracks when the slots are free."""

    def announce(self, bucket: int, slot: int, readers: Collection[int]) -> None:
        """Announces a bucket in a slot."""
        ...

    def wait_until_free(self, slot: int) -> None:
        """Waits until the slot has no reader."""
        ...

    def wait_until_all_free(self) -> None:
        """Waits until no slot has a reader."""
        ...


class SendStage:
    """The first stage: host memory to H2D buffer."""

    name = "h2d"

    def __init__(
        self,
        plan: RankPlan,
        h2d: Buffer,
        outlet: Announcing,
        spans: Spans,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        plan: this device's part of the plan.
        h2d: the H2D buffer into which buckets are gathered.
        outlet: announces buckets to the ranks that read the buffer.
        spans: records the times at which the stage is busy.
        moved: called after each bucket.
        """
        self._plan, self._h2d, self._outlet, self._spans, self._moved = plan, h2d, outlet, spans, moved
        self.num_moved = 0

    def run(self) -> None:
        """Raises:
        CannotGoOn: another device is gone or stalled.
        Cancelled: the update has been aborted.
        """
        for number, bucket in enumerate(self._plan.own):
            slot = number % self._h2d.num_slots
            self._outlet.wait_until_free(slot)
            with self._spans.of(self.name, bucket.index):
                seal(self._h2d.view(slot), bucket, self._plan.gather(number, self._h2d.view(slot)))
            self._outlet.announce(bucket.index, slot, bucket.devices)
            self.num_moved += 1
            self._moved()
        self._outlet.wait_until_all_free()


def device_outlet(
    update: int, plan: RankPlan, readers: Mapping[int, Connection], deadline_s: float, stop: CancelToken
) -> Outlet:
    """Creates the outlet for the devices that read this one's H2D buffer. The loss of one aborts the update."""
    patience_s = deadline_s + DEVICE_PATIENCE_S
    return Outlet(update, readers, patience_s, stop, _blame_device, _nothing_else, plan.size_of)


def _blame_device(rank: int, error: Exception) -> None:
    raise CannotGoOn.because_of(rank, error)


def _nothing_else(rank: int, message: AnyTransferMessage) -> None:
    raise CannotGoOn(f"rank {rank}", f"it sent {message!r:.80}")


class IpcBuffer(NamedTuple):
    """An IPC buffer of this device, and the number by which consumers know its first slot."""

    buffer: Buffer
    first_slot: int


class ReceiveStage:
    """The second stage: from the H2D buffers of the sources to the consumers of this device.

    The stage frees a slot of a source when all these consumers have freed it; if it copies the bucket, after the copy.
    """

    name = "broadcast"

    def __init__(
        self,
        update: int,
        plan: RankPlan,
        sources: Mapping[int, SourceBuffer],
        ipc: IpcBuffer | None,
        consumers: Mapping[int, Attached],
        deadline_s: float,
        stop: CancelToken,
        spans: Spans,
    ) -> None:
        """Args:
        update: number of the update.
        plan: this device's part of the plan.
        sources: connections to the sources, by rank.
        ipc: the buffer into which buckets are copied; None: the consumers map the sources' buffers.
        consumers: this device's consumers in the update, by reader index. They have mapped the buffers.
        deadline_s: time without progress after which a consumer counts as lost; for a device it is a little longer.
        stop: cancels all waits.
        spans: records the times at which the stage is busy.
        """
        self._update, self._plan, self._ipc, self._spans = update, plan, ipc, spans
        self._deadline_s = deadline_s
        patience_s = deadline_s + SOURCE_PATIENCE_S
        self._sources = sources
        self._inlets = {
            # The device's own first stage reports by itself what it waits for.
            rank: Inlet(update, each.connection, each.buffer, patience_s if rank != plan.rank else 2 * patience_s, stop)
            for rank, each in sources.items()
        }
        self._lent: dict[int, tuple[int, int]] = {}
        """Number of a slot for consumers -> (rank of its owner, its number in the owner's buffer)."""
        self._consumers = consumers
        connections = {reader: consumer.connection for reader, consumer in consumers.items()}
        lose, hear, size_of = self._lose, self._hear, plan.size_of
        self._outlet = Outlet(update, connections, deadline_s, stop, lose, hear, size_of, self._give_back)
        keys = {each.proxy: -1 - reader for reader, each in consumers.items() if each.proxy is not None}
        through = {reader: keys[each.proxy] for reader, each in consumers.items() if each.proxy is not None}
        self._outlet.share({key: proxy.connection for proxy, key in keys.items()}, through)
        self._loaded: set[int] = set()
        self._taken: set[int] = set()
        self._checksums: dict[int, bytes] = {}
        self.failures: list[SubscriberLost | LoadError | ChecksumMismatch] = []
        self.reloads: tuple[Span, ...] = ()
        """The first reload times of the first consumer that has loaded everything, on its machine's clock."""
        self.num_moved = 0

    def run(self) -> None:
        """Raises:
        CannotGoOn: a source is gone or stalled.
        Cancelled: the update has been aborted.
        """
        for number, bucket in enumerate(self._plan.coming):
            self._pass_on(bucket, number)
            self.num_moved += 1
        self._outlet.wait_while(lambda: self._outlet.readers - self._loaded)
        self._outlet.wait_until_all_free()  # a consumer on another node reports before its node frees the slots

    @property
    def loaded(self) -> list[Attached]:
        """The consumers that have loaded the complete version."""
        return [self._consumers[reader] for reader in sorted(self._loaded & self._outlet.readers)]

    def hand_over(self, version: int, stop: CancelToken) -> None:
        """Tells the consumers that the version is committed, and waits until those in `loaded` have switched to it.

        Args:
            version: number of the version.
            stop: ends the wait. A consumer that has not switched by then switches later.
        """
        patience_s = self._deadline_s + SWITCH_PATIENCE_S
        tell(self.loaded, VersionCommitted(self._update, version))
        connections = {reader: self._consumers[reader].connection for reader in self._loaded & self._outlet.readers}
        size_of = self._plan.size_of
        self._outlet = Outlet(self._update, connections, patience_s, stop, self._lose, self._hear, size_of)
        with contextlib.suppress(Cancelled):
            self._outlet.wait_while(lambda: self._outlet.readers - self._taken)
        for each in self.taken:
            each.version = version

    @property
    def taken(self) -> list[Attached]:
        """The consumers that have switched to the version."""
        return [self._consumers[reader] for reader in sorted(self._taken)]

    def _pass_on(self, bucket: Bucket, number: int) -> None:
        try:
            ready = self._inlets[bucket.source].next(bucket, self._outlet.hear_until)
            if isinstance(ready, BucketUnchanged):
                self._checksums[bucket.index] = ready.checksum
                self._outlet.announce_unchanged(bucket.index, ready.checksum, bucket.readers)
            elif self._ipc is None:
                self._lend(bucket, ready.slot)
            else:
                self._copy(bucket, ready.slot, number % self._ipc.buffer.num_slots, self._ipc)
        except (PeerLost, RemoteProtocolError) as error:
            raise CannotGoOn.because_of(bucket.source, error) from None

    def _lend(self, bucket: Bucket, theirs: int) -> None:
        """Announces a slot of the source's buffer to the consumers, which read it directly."""
        source = self._sources[bucket.source]
        slot = source.first_slot + theirs
        with self._spans.of(self.name, bucket.index):
            self._checksums[bucket.index] = checksum_in(source.buffer.view(theirs), bucket)
            self._lent[slot] = bucket.source, theirs
            self._outlet.announce(bucket.index, slot, bucket.readers)

    def _give_back(self, slot: int) -> None:
        """Called when the consumers have freed a slot. Frees it at its source, if it is a source's slot."""
        if (lent := self._lent.pop(slot, None)) is not None:
            rank, theirs = lent
            try:
                self._inlets[rank].free(theirs)
            except PeerLost as error:
                raise CannotGoOn.because_of(rank, error) from None

    def _copy(self, bucket: Bucket, theirs: int, slot: int, ipc: IpcBuffer) -> None:
        """Copies the bucket into this device's IPC buffer and announces it to the consumers."""
        self._outlet.wait_until_free(ipc.first_slot + slot)
        with self._spans.of(self.name, bucket.index):
            content = self._sources[bucket.source].buffer.view(theirs)
            ipc.buffer.fill(slot, content, bucket.num_bytes + CHECKSUM_BYTES)
        self._inlets[bucket.source].free(theirs)
        self._checksums[bucket.index] = checksum_in(ipc.buffer.view(slot), bucket)
        self._outlet.announce(bucket.index, ipc.first_slot + slot, bucket.readers)

    def _hear(self, reader: int, message: AnyTransferMessage) -> None:
        match message:
            case VersionLoaded(update=update, checksum=checksum, reloads=reloads) if update == self._update:
                self.reloads = self.reloads or tuple(Span("reload", *each) for each in reloads)
                self._compare(reader, checksum)
            case VersionTaken(update=update) if update == self._update:
                self._taken.add(reader)
            case LoadFailed(update=update, reason=reason) if update == self._update:
                self.failures.append(LoadError(f"{self._consumers[reader].name}: {reason}"))
                self._outlet.leave_out(reader)
            case VersionLoaded() | VersionTaken() | LoadFailed():
                pass  # of an earlier update
            case other:
                self._outlet.leave_out(reader, RemoteProtocolError(f"sent {other!r:.80}"))

    def _compare(self, reader: int, checksum: bytes) -> None:
        """Compares the checksum of a consumer that has loaded everything."""
        own = (self._checksums.get(each.index, b"") for each in self._plan.coming if reader in each.readers)
        if checksum == checksum_of_version(own):
            self._loaded.add(reader)
            return
        consumer = self._consumers[reader]
        reason = "what it has is not the whole version: its checksum is another one"
        self.failures.append(ChecksumMismatch(f"{consumer.name}: {reason}"))
        self._outlet.leave_out(reader)
        tell([consumer], UpdateAborted(self._update, TransferFault.CHECKSUM, consumer.name, reason))

    def _lose(self, reader: int, error: PeerLost | RemoteProtocolError) -> None:
        """Removes a consumer that is lost or stalled. The others continue, and it must attach again."""
        consumer = self._consumers[reader]
        self.failures.append(SubscriberLost(f"{consumer.name}: {what_of(error)}"))
        consumer.connection.close()


class Stages:
    """Runs both stages, each in a thread of its own."""

    def __init__(self, sending: SendStage | None, receiving: ReceiveStage | None, stop: CancelToken) -> None:
        """Starts them.

        Args:
            sending, receiving: the stages; None if the device has no such stage.
            stop: the stages' cancel token. `close` closes it.
        """
        self.changed = CancelToken()
        """Set when a stage has ended."""
        self._stop = stop
        self._stages = [stage for stage in (sending, receiving) if stage is not None]
        self._num_done = 0
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._carry_out, args=[stage], name=f"keepstep-{stage.name}", daemon=True)
            for stage in self._stages
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_moved(self) -> int:
        """Buckets so far, by all stages."""
        return sum(stage.num_moved for stage in self._stages)

    @property
    def are_done(self) -> bool:
        """Whether all have come to their end."""
        return self._num_done == len(self._stages)

    def first_error(self) -> Exception | None:
        """Returns the first error of a stage, None if there is none, and clears ``changed``."""
        self.changed.clear()
        return self._errors[0] if self._errors else None

    def close(self) -> None:
        """Cancels running stages and waits for their threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._stop.close()
        self.changed.close()

    def _carry_out(self, stage: SendStage | ReceiveStage) -> None:
        try:
            stage.run()
            self._num_done += 1
        except Cancelled:
            return
        except Exception as error:  # the publishing thread reports it and raises it again
            self._errors.append(error)
        self.changed.set()
