"""Delta updates: only changed buckets are sent.

A source computes each bucket's checksum anyway, while it gathers the bucket. If it equals that of the previous version,
and every reader on a device has that version, the source notifies the device instead of sending the bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import xxhash

from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.plan import Bucket, Piece, TensorForm
from keepstep.weights.channels.flow import Outlet
from keepstep.weights.memory.buffers import Buffer
from keepstep.weights.memory.copies import checksum_in


@dataclasses.dataclass(frozen=True, slots=True)
class SentVersion:
    """What a source sent of the last version that counts, and kept.

    Attributes:
        version: its number.
        forms: shapes and dtypes of the tensors in the buckets.
        checksums: checksum of each bucket, by its pieces. Bucket indices change when consumers attach or leave.
    """

    version: int
    forms: tuple[TensorForm, ...]
    checksums: Mapping[tuple[Piece, ...], bytes]


class DeltaOutlet:
    """The writing side of an H2D buffer. It sends a bucket only to the devices that lack its content."""

    def __init__(
        self,
        outlet: Outlet,
        h2d: Buffer,
        own: Sequence[Bucket],
        layout: Layout,
        holds: Sequence[int | None],
        base: SentVersion | None,
    ) -> None:
        """Args:
        outlet: sends messages to the devices.
        h2d: this source's H2D buffer.
        own: the buckets that this source sends.
        layout: layout of the update.
        holds: by reader: the version that it has, if it uses delta updates.
        base: the version that this source sent last. It is ignored for buffers on a GPU: their checksum is a sum, in
            which two changes may cancel out. That suffices to detect accidents, but not to prove that nothing changed.
        """
        self._outlet, self._h2d, self._layout = outlet, h2d, layout
        self._buckets = {bucket.index: bucket for bucket in own}
        is_usable = base is not None and base.forms == layout.travelling and h2d.view(0).device.type == "cpu"
        self._base = base if is_usable else None
        version = None if self._base is None else self._base.version
        self._lacking = {reader for reader, held in enumerate(holds) if held is None or held != version}
        self._checksums: dict[tuple[Piece, ...], bytes] = {}
        self.sent_bytes = 0
        """Total size of the buckets that were sent to at least one device."""
        self.unchanged_bytes = 0
        """Total size of the buckets that were sent to no device."""

    def announce(self, bucket: int, slot: int, readers: Collection[int]) -> None:
        """Announces a bucket in a slot to the devices that lack it, and to the others that it is unchanged."""
        which = self._buckets[bucket]
        checksum = checksum_in(self._h2d.view(slot), which)
        self._checksums[which.pieces] = checksum
        lacking = set(readers)
        if self._base is not None and self._base.checksums.get(which.pieces) == checksum:
            lacking = {self._layout.readers[reader].device for reader in which.readers if reader in self._lacking}
        self._outlet.announce(bucket, slot, lacking)
        self._outlet.announce_unchanged(bucket, checksum, set(readers) - lacking)
        if lacking:
            self.sent_bytes += which.num_bytes
        else:
            self.unchanged_bytes += which.num_bytes

    def wait_until_free(self, slot: int) -> None:
        """Waits until the slot has no reader."""
        self._outlet.wait_until_free(slot)

    def wait_until_all_free(self) -> None:
        """Waits until no slot has a reader."""
        self._outlet.wait_until_all_free()

    def sent(self, version: int) -> SentVersion:
        """The record of this version, the base of the next one. Call it once the version is committed."""
        return SentVersion(version, self._layout.travelling, self._checksums)


def checksum_of_version(checksums: Iterable[bytes]) -> bytes:
    """The checksum of one consumer's complete version: xxh3 over the checksums of its buckets, in their order."""
    return xxhash.xxh3_64_digest(b"".join(checksums))
