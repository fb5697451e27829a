"""The memory for snapshots: a file of slots that a worker writes, and its agent holds open as well.

The agent creates it, like the tag page, so a snapshot outlives the worker, and a replacement on the same node can read
it. It is an anonymous file in memory, which disappears with both processes. A slot that was never written takes no
memory, and a slot may grow: the slots are far apart in a sparse file. A worker keeps snapshots of its own rank there,
and second copies of other ranks'.

A slot begins with its header, in a separate page. The worker clears the header before it writes the slot, and writes it
last: whenever the worker dies, a valid header means a complete snapshot.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import threading
from collections import defaultdict

import xxhash

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import SnapshotsByRank
from keepstep.protocol.snapshots import slot_to_replace

_STRIDE = 1 << 44
"""From one slot to the next: more than any machine has."""
_HEADER = struct.Struct("<8sqqQ16s")
"""Magic, rank, step, bytes of the snapshot, and their xxh3 of 128 bits."""
_SEALED_BYTES = _HEADER.size + 8
"""With the xxh3 of 64 bits of the header itself."""
_MAGIC = b"ksslot02"
_PAGE = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True, slots=True)
class WholeSnapshot:
    """What a slot's header says: all of this snapshot is there."""

    slot: int
    rank: int
    step: int
    """Whose forward reads these parameters."""
    num_bytes: int
    digest: bytes
    """The 16 bytes of xxh3_128 over them."""


def create(name: str) -> int:
    """Makes the file and returns its descriptor, which the caller owns.

    Args:
        name: shows in ``/proc/PID/fd`` only; it is no path and nothing can open it by it.
    """
    descriptor = os.memfd_create(f"keepstep-{name}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _PAGE)
    return descriptor


def whole_snapshots(descriptor: int) -> list[WholeSnapshot]:
    """The whole snapshots in the file, by their slots. Reads the headers only."""
    slots = range(os.fstat(descriptor).st_size // _STRIDE + 1)
    return [found for found in (_read_header(descriptor, slot) for slot in slots) if found is not None]


def steps_by_rank(snapshots: list[WholeSnapshot]) -> SnapshotsByRank:
    """The same as the messages have it."""
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for each in snapshots:
        steps[each.rank].append(each.step)
    return tuple((rank, tuple(sorted(steps[rank]))) for rank in sorted(steps))


def _read_header(descriptor: int, slot: int) -> WholeSnapshot | None:
    sealed = os.pread(descriptor, _SEALED_BYTES, slot * _STRIDE)
    header, checksum = sealed[: _HEADER.size], sealed[_HEADER.size :]
    if len(sealed) < _SEALED_BYTES or checksum != xxhash.xxh3_64_digest(header):
        return None
    magic, rank, step, num_bytes, digest = _HEADER.unpack(header)
    return WholeSnapshot(slot, rank, step, num_bytes, digest) if magic == _MAGIC else None


class SnapshotFile:
    """One end's view of the file. Several threads may write to it, each to a slot of its own."""

    def __init__(self, descriptor: int) -> None:
        """Args:
        descriptor: of the file; this object closes it when it goes.
        """
        self._descriptor = descriptor
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._being_written: set[int] = set()

    @property
    def whole(self) -> list[WholeSnapshot]:
        """All whole snapshots."""
        return whole_snapshots(self._descriptor)

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """The rank and step of each of them, by its slot: as `keepstep.protocol.snapshots` asks for them."""
        return {each.slot: (each.rank, each.step) for each in self.whole}

    def find(self, rank: int, step: int) -> WholeSnapshot | None:
        """The whole snapshot of a rank and step."""
        return next((each for each in self.whole if (each.rank, each.step) == (rank, step)), None)

    def steps(self, rank: int) -> list[int]:
        """The steps of a rank's whole snapshots."""
        return [each.step for each in self.whole if each.rank == rank]

    def discard(self, slot: int) -> None:
        """What is in a slot counts no more."""
        os.pwrite(self._descriptor, bytes(_SEALED_BYTES), slot * _STRIDE)

    def leave(self, slot: int) -> None:
        """A slot that was chosen is not written any more: it is sealed, or free again."""
        self._being_written.discard(slot)

    def choose(self, rank: int, kept_step: int | None) -> int:
        """Discards what is in the slot for a new snapshot of a rank. The slot is the caller's until `leave`.

        Args:
            rank: whose.
            kept_step: of the snapshot that is not written over; see `keepstep.protocol.snapshots`.
        """
        with self._lock:
            held = self.held
            slot = slot_to_replace(held, rank, kept_step)
            taken = {*held, *self._being_written}
            slot = next(number for number in range(len(taken) + 1) if number not in taken) if slot is None else slot
            self.discard(slot)
            self._being_written.add(slot)
            return slot

    def capacity(self, slot: int) -> int:
        """How many bytes a slot has had memory for until now."""
        return len(self._maps[slot]) if slot in self._maps else 0

    def open_for_writing(self, slot: int, num_bytes: int) -> mmap.mmap:
        """The memory of a slot that was chosen, of at least ``num_bytes``. The view stays this object's.

        The memory is taken page by page as it is written.

        Raises:
            OSError: the system does not give it.
        """
        view = self._maps.get(slot)
        if view is None or len(view) < num_bytes:
            end = _STRIDE * slot + _PAGE + num_bytes
            with self._lock:
                if os.fstat(self._descriptor).st_size < end:
                    os.ftruncate(self._descriptor, end)
            # The former view is not closed: a tensor that was made of it may be left. It ends with the last of them.
            view = self._maps[slot] = mmap.mmap(self._descriptor, num_bytes, offset=_STRIDE * slot + _PAGE)
        return view

    def seal(self, snapshot: WholeSnapshot) -> None:
        """All bytes are in the slot: from now on its snapshot counts."""
        content = (snapshot.rank, snapshot.step, snapshot.num_bytes, snapshot.digest)
        header = _HEADER.pack(_MAGIC, *content)
        os.pwrite(self._descriptor, header + xxhash.xxh3_64_digest(header), snapshot.slot * _STRIDE)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, rank: int, step: int) -> mmap.mmap:
        """The bytes of a snapshot. The caller closes the view; what it writes there is its own.

        Raises:
            RemoteProtocolError: there is no snapshot of this rank and step, or its checksum is wrong.
        """
        found = self.find(rank, step)
        if found is None:
            raise RemoteProtocolError(f"there is no snapshot of rank {rank} at step {step} in memory")
        offset = _STRIDE * found.slot + _PAGE
        view = mmap.mmap(self._descriptor, found.num_bytes, access=mmap.ACCESS_COPY, offset=offset)
        if xxhash.xxh3_128_digest(view) == found.digest:
            return view
        view.close()
        raise RemoteProtocolError(f"the snapshot of rank {rank} at step {step} in memory has a wrong checksum")
