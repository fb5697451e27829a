"""A version that a node keeps, to feed those who come late: restarted engines, and nodes further down."""

from __future__ import annotations

import dataclasses
import threading

from keepstep.errors import StateMismatch
from keepstep.protocol.transfer.layout import Consumer, Layout, serve_one
from keepstep.protocol.transfer.messages import BucketUnchanged, SubscriberCalled, UpdateBegan
from keepstep.protocol.transfer.plan import Bucket

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

    def reader_like(self, introduction: SubscriberCalled) -> int | None:
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


@dataclasses.dataclass(slots=True, eq=False)
class Serving:
    """A consumer that is being given what is kept."""

    update: int
    loaded: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when it has all of it, or takes no more."""
    taken: threading.Event = dataclasses.field(default_factory=threading.Event)
    has_failed: bool = False


class VersionKeeper:
    """Keeps the last committed version, and what has come of the next. Called with the switch locked."""

    def __init__(self) -> None:
        self._coming: dict[int, Version] = {}
        self._last_update = FIRST_UPDATE
        self.kept: Version | None = None

    def begin(self, began: UpdateBegan, buckets: dict[int, Bucket]) -> None:
        """An update begins on a tunnel; what has come of other ones that never counted is dropped."""
        coming = Version(began.version, began.generation, began.layout, buckets)
        if (there := self._coming.get(began.update)) is None or not there.is_like(coming):
            self._coming = {began.update: coming}

    def came(self, update: int, bucket: int, content: memoryview) -> None:
        """A bucket has come."""
        if (coming := self._coming.get(update)) is not None:
            coming.contents[bucket] = bytes(content)

    def stayed(self, unchanged: BucketUnchanged) -> None:
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

    def serve(self, introduction: SubscriberCalled) -> tuple[Version, int, Serving] | None:
        """What a consumer gets that comes now, as which reader; None: nothing that is newer than what it has."""
        kept = self.kept
        if kept is None or introduction.generation > kept.generation:
            return None
        if introduction.version is not None and introduction.version >= kept.version:
            return None
        if (reader := kept.reader_like(introduction)) is None:
            return None
        self._last_update += 1
        return kept, reader, Serving(self._last_update)
