"""A version that a node keeps, to feed those who come late: restarted engines, and nodes further down."""

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
"""Updates that a node numbers itself begin here; those of devices count up from 1."""


@dataclasses.dataclass(slots=True, eq=False)
class Version:
    """The buckets of an update, as far as they have come.

    Attributes:
        contents: by index: the bucket and its checksum.
    """

    version: int
    generation: int
    layout: Layout
    buckets: dict[int, Bucket]
    contents: dict[int, bytes] = dataclasses.field(default_factory=dict)

    def is_like(self, other: Version) -> bool:
        """Whether both are the same, apart from how much has come."""
        return (self.version, self.generation, self.layout) == (other.version, other.generation, other.layout)

    def buckets_of(self, reader: int) -> list[Bucket] | None:
        """What one reader needs; None if not all of it is here."""
        wanted = [bucket for bucket in self.buckets.values() if reader in bucket.readers]
        return wanted if all(bucket.index in self.contents for bucket in wanted) else None

    def reader_like(self, introduction: msg.SubscriberCalled) -> int | None:
        """A reader that wanted what this consumer wants, and all of whose buckets are here; None: there is none."""
        try:
            alone = serve_one(self.layout, 0, Consumer(introduction.name, introduction.wants))
        except StateMismatch:
            return None  # the device says why
        (wanted,) = alone.readers
        came, wants = self.layout.travelling, alone.travelling
        if any(came[part.tensor] != wants[part.tensor] for part in wanted.parts):
            return None  # cast at their source for others, or not for others and for this one
        for index, (reader, problem) in enumerate(zip(self.layout.readers, self.layout.problems, strict=True)):
            if problem is None and reader.parts == wanted.parts and self.buckets_of(index) is not None:
                return index
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class ForConsumer:
    """What a consumer gets of a version that is kept, as which of its readers, and the update's number here."""

    version: Version
    reader: int
    update: int


class Passing(Protocol):
    """What passes messages and buckets on to consumers; see `keepstep.weights.remote.switch.Switch`."""

    def hear(self, tunnel: int, message: msg.AnyTransferMessage) -> None:
        """As a device says it to a consumer."""
        ...

    def hear_all(self, message: msg.ToProxied) -> None:
        """As a device says it to several."""
        ...

    def bring(self, update: int, bucket: int, num_bytes: int, fill: Fill) -> None:
        """A bucket comes."""
        ...

    def served(self, number: int, version: int | None, has_failed: bool) -> None:
        """What is kept has been brought to a consumer."""
        ...


class Serving:
    """Brings a consumer what is kept, as its device would, in a thread of its own."""

    def __init__(
        self, passing: Passing, tunnel: int, kept: ForConsumer, welcomed: msg.Welcomed, deadline_s: float
    ) -> None:
        """Begins. ``passing`` is locked by the caller.

        Args:
            passing: what passes it on.
            tunnel: of the consumer.
            kept: what it gets.
            welcomed: what it is told first.
            deadline_s: for it to take all of it, and then to switch to it.
        """
        self._passing, self._tunnel, self._kept, self._welcomed = passing, tunnel, kept, welcomed
        self._deadline_s = deadline_s
        self._loaded, self._taken = threading.Event(), threading.Event()
        self._has_failed = False
        threading.Thread(target=self._run, name="keepstep-kept", daemon=True).start()

    def hear(self, message: msg.AnyTransferMessage) -> None:
        """The consumer says something."""
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
        """The consumer takes no more of it, or is gone."""
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
    """Keeps the last committed version, and what has come of the next. Called with the switch locked."""

    def __init__(self) -> None:
        self._coming: dict[int, Version] = {}
        self._last_update = FIRST_UPDATE
        self.kept: Version | None = None

    def begin(self, began: msg.UpdateBeganFor, buckets: dict[int, Bucket]) -> None:
        """An update begins; what has come of other ones that never counted is dropped."""
        coming = Version(began.version, began.generation, began.layout, buckets)
        if self.kept is not None and self.kept.is_like(coming):
            return  # it comes again for some consumers, maybe while the next version comes for all
        if (there := self._coming.get(began.update)) is None or not there.is_like(coming):
            self._coming = {began.update: coming}

    def came(self, update: int, bucket: int, content: memoryview) -> None:
        """A bucket has come."""
        if (coming := self._coming.get(update)) is not None:
            coming.contents[bucket] = bytes(content)

    def stayed(self, unchanged: msg.BucketUnchanged) -> None:
        """A bucket does not come, since a consumer has it from the version before; which may be the one kept here."""
        coming, kept = self._coming.get(unchanged.update), self.kept
        bucket = None if coming is None else coming.buckets.get(unchanged.bucket)
        if coming is None or kept is None or bucket is None or kept.layout.forms != coming.layout.forms:
            return
        for index, content in kept.contents.items():
            if kept.buckets[index].pieces == bucket.pieces and content.endswith(unchanged.checksum):
                coming.contents.setdefault(bucket.index, content)

    def commit(self, update: int) -> None:
        """The update counts."""
        coming, kept = self._coming.get(update), self.kept
        if coming is None:
            return
        if kept is None or (kept.generation, kept.version) != (coming.generation, coming.version):
            self.kept = coming  # else it came again for one consumer, and the first time for more

    def for_consumer(self, introduction: msg.SubscriberCalled) -> ForConsumer | None:
        """What a consumer gets that comes now; None: nothing that is newer than what it has."""
        kept = self.kept
        if kept is None or introduction.generation > kept.generation:
            return None
        if introduction.version is not None and introduction.version >= kept.version:
            return None
        if (reader := kept.reader_like(introduction)) is None:
            return None
        self._last_update += 1
        return ForConsumer(kept, reader, self._last_update)
