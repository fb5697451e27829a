"""The version that a node keeps for consumers that attach late: restarted engines, and nodes that it feeds."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Protocol

from keepstep.errors import PeerLost, StateMismatch
from keepstep.protocol.transfer import messages as msg
from keepstep.protocol.transfer.layout import Consumer, Layout, serve_one
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.buffers import Fill, SlotPart

FIRST_UPDATE = 1 << 62
"""First number of updates that a node numbers itself. Devices number theirs from 1."""


@dataclasses.dataclass(slots=True, eq=False)
class Version:
    """A version with the buckets that have arrived so far.

    Attributes:
        contents: index -> content of the bucket and its checksum.
    """

    version: int
    generation: int
    layout: Layout
    buckets: dict[int, Bucket]
    contents: dict[int, bytes] = dataclasses.field(default_factory=dict)

    def is_like(self, other: Version) -> bool:
        """Whether both are the same version with the same layout, apart from the buckets that have arrived."""
        return (self.version, self.generation, self.layout) == (other.version, other.generation, other.layout)

    def buckets_of(self, reader: int) -> list[Bucket] | None:
        """The buckets that a reader needs; None if not all of them have arrived."""
        wanted = [bucket for bucket in self.buckets.values() if reader in bucket.readers]
        return wanted if all(bucket.index in self.contents for bucket in wanted) else None

    def reader_like(self, introduction: msg.SubscriberCalled) -> int | None:
        """A reader with the same request as this consumer whose buckets have all arrived; None if there is none."""
        try:
            alone = serve_one(self.layout, 0, Consumer(introduction.name, introduction.wants))
        except StateMismatch:
            return None  # the device will refuse the consumer and give the reason
        (wanted,) = alone.readers
        came, wants = self.layout.travelling, alone.travelling
        if any(came[part.tensor] != wants[part.tensor] for part in wanted.parts):
            return None  # the kept tensors have other dtypes than this consumer would get from the source
        for index, (reader, problem) in enumerate(zip(self.layout.readers, self.layout.problems, strict=True)):
            if problem is None and reader.parts == wanted.parts and self.buckets_of(index) is not None:
                return index
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class ForConsumer:
    """A kept version for one consumer: the reader whose buckets it gets, and this node's number for the update."""

    version: Version
    reader: int
    update: int


class Passing(Protocol):
    """Forwards messages and buckets to consumers; see `keepstep.weights.remote.switch.Switch`."""

    def hear(self, tunnel: int, message: msg.AnyTransferMessage) -> None:
        """Handles a message as from a device to one consumer."""
        ...

    def hear_all(self, message: msg.ToProxied) -> None:
        """Handles a message as from a device to several consumers."""
        ...

    def bring(self, update: int, bucket: int, num_bytes: int, fill: Fill) -> None:
        """Handles an arriving bucket."""
        ...

    def served(self, number: int, version: int | None, has_failed: bool) -> None:
        """Called when a consumer has received the kept version (None: has not)."""
        ...


class Serving:
    """Sends the kept version to a consumer, as a device would, in a thread of its own."""

    def __init__(
        self, passing: Passing, tunnel: int, kept: ForConsumer, welcomed: msg.Welcomed, deadline_s: float
    ) -> None:
        """Starts the thread. The caller holds the lock of ``passing``.

        Args:
            passing: forwards messages and buckets.
            tunnel: tunnel of the consumer.
            kept: the version for the consumer.
            welcomed: the first message to the consumer.
            deadline_s: timeout for the consumer to load the version, and again to switch to it.
        """
        self._passing, self._tunnel, self._kept, self._welcomed = passing, tunnel, kept, welcomed
        self._deadline_s = deadline_s
        self._loaded, self._taken = threading.Event(), threading.Event()
        self._has_failed = False
        threading.Thread(target=self._run, name="keepstep-kept", daemon=True).start()

    def hear(self, message: msg.AnyTransferMessage) -> None:
        """Handles a message of the consumer."""
        match message:
            case msg.VersionLoaded(update=self._kept.update):
                self._loaded.set()
            case msg.VersionTaken(update=self._kept.update):
                self._taken.set()
            case msg.LoadFailed(update=self._kept.update):
                self.end()
            case _:
                pass

    def end(self) -> None:
        """Stops, because the consumer has failed to load the version or is gone."""
        self._has_failed = True
        self._loaded.set()
        self._taken.set()

    def _run(self) -> None:
        passing, tunnel, version, update = self._passing, self._tunnel, self._kept.version, self._kept.update
        member = msg.ProxiedReader(tunnel, self._kept.reader, None)
        passing.hear(tunnel, self._welcomed)
        passing.hear_all(msg.UpdateBeganFor(update, version.version, version.generation, version.layout, (member,)))
        try:
            for bucket in version.buckets_of(self._kept.reader) or []:
                content = version.contents[bucket.index]
                passing.bring(update, bucket.index, len(content), functools.partial(_fill_with, content))
        except PeerLost:  # no slot came free: `served` ends the tunnel
            self._deadline_s = 0.0
        is_loaded = self._loaded.wait(self._deadline_s) and not self._has_failed
        if is_loaded:
            passing.hear_all(msg.SaidTo((tunnel,), msg.VersionCommitted(update, version.version)))
        is_taken = is_loaded and self._taken.wait(self._deadline_s) and not self._has_failed
        passing.served(tunnel, version.version if is_taken else None, self._has_failed)


def _fill_with(content: bytes, part: SlotPart | None) -> None:
    if part is not None:
        part.content[:] = content


class VersionKeeper:
    """Keeps the last committed version, and the buckets of the next one. Call it with the switch locked."""

    def __init__(self) -> None:
        self._coming: dict[int, Version] = {}
        self._last_update = FIRST_UPDATE
        self.kept: Version | None = None

    def begin(self, began: msg.UpdateBeganFor, buckets: dict[int, Bucket]) -> None:
        """Begins an update. Drops the buckets of other updates that were never committed."""
        coming = Version(began.version, began.generation, began.layout, buckets)
        if self.kept is not None and self.kept.is_like(coming):
            return  # the kept version is sent again to some consumers, maybe during the update to the next version
        if (there := self._coming.get(began.update)) is None or not there.is_like(coming):
            self._coming = {began.update: coming}

    def came(self, update: int, bucket: int, content: memoryview) -> None:
        """Keeps a bucket that has arrived."""
        if (coming := self._coming.get(update)) is not None:
            coming.contents[bucket] = bytes(content)

    def stayed(self, unchanged: msg.BucketUnchanged) -> None:
        """Handles an unchanged bucket, which is not sent: copies its content from the kept version, if that has it."""
        coming, kept = self._coming.get(unchanged.update), self.kept
        bucket = None if coming is None else coming.buckets.get(unchanged.bucket)
        if coming is None or kept is None or bucket is None or kept.layout.forms != coming.layout.forms:
            return
        for index, content in kept.contents.items():
            if kept.buckets[index].pieces == bucket.pieces and content.endswith(unchanged.checksum):
                coming.contents.setdefault(bucket.index, content)

    def commit(self, update: int) -> None:
        """Commits an update: its version becomes the kept one."""
        coming, kept = self._coming.get(update), self.kept
        if coming is None:
            return
        if kept is None or (kept.generation, kept.version) != (coming.generation, coming.version):
            self.kept = coming  # same version: it was sent again to fewer consumers, so the kept one has more buckets

    def for_consumer(self, introduction: msg.SubscriberCalled) -> ForConsumer | None:
        """The kept version for a new consumer; None if it has nothing newer for this consumer."""
        kept = self.kept
        if kept is None or introduction.generation > kept.generation:
            return None
        if introduction.version is not None and introduction.version >= kept.version:
            return None
        if (reader := kept.reader_like(introduction)) is None:
            return None
        self._last_update += 1
        return ForConsumer(kept, reader, self._last_update)
