"""The memory for snapshots: a file of slots that a worker writes, and that its agent holds open as well.

The agent creates the file, like the tag page. So a snapshot outlives the worker, and a replacement on the same node can
read it. It is an anonymous file in memory, which disappears with both processes. The file is sparse, and its slots are
far apart: a slot that was never written takes no memory, and a slot may grow. A worker keeps snapshots of its own rank
there, and second copies of other ranks.

A slot begins with its header, in a separate page. The worker clears the header before it writes the slot, and writes
the header last. So whenever the worker dies, a valid header means a complete snapshot.
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
from keepstep.systemcalls import memory_file

_STRIDE = 1 << 44
"""Distance between two slots in bytes: more than the memory of any machine."""
_HEADER = struct.Struct("<8sqqQ16s")
"""Magic, rank, step, size of the snapshot in bytes, and the xxh3_128 of the snapshot."""
_SEALED_BYTES = _HEADER.size + 8
"""Size of the header with its own xxh3_64."""
_MAGIC = b"ksslot02"
_PAGE = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True, slots=True)
class WholeSnapshot:
    """A complete snapshot in a slot, by the slot's header."""

    slot: int
    rank: int
    step: int
    """The step of the snapshot: that whose forward reads these parameters."""
    num_bytes: int
    digest: bytes
    """The xxh3_128 of the snapshot's bytes, 16 bytes."""


def create(name: str) -> int:
    """Creates the file and returns its descriptor, which the caller owns.

    Args:
        name: a name for people, shown in ``/proc/PID/fd`` only. It is no path.
    """
    return memory_file(name, _PAGE)


def whole_snapshots(descriptor: int) -> list[WholeSnapshot]:
    """Returns the complete snapshots in the file, in the order of their slots. Reads only the headers."""
    slots = range(os.fstat(descriptor).st_size // _STRIDE + 1)
    return [found for found in (_read_header(descriptor, slot) for slot in slots) if found is not None]


def steps_by_rank(snapshots: list[WholeSnapshot]) -> SnapshotsByRank:
    """Converts a list of snapshots to the form that messages use."""
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
    """One process's view of the file. Several threads may write to it, each to its own slot."""

    def __init__(self, descriptor: int) -> None:
        """Args:
        descriptor: the file's descriptor. This object owns it, and closes it when it is destroyed.
        """
        self._descriptor = descriptor
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._being_written: set[int] = set()

    @property
    def whole(self) -> list[WholeSnapshot]:
        """All complete snapshots."""
        return whole_snapshots(self._descriptor)

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Slot -> (rank, step) of each complete snapshot, as `keepstep.protocol.snapshots` takes it."""
        return {each.slot: (each.rank, each.step) for each in self.whole}

    def find(self, rank: int, step: int) -> WholeSnapshot | None:
        """Returns the complete snapshot of a rank and step; None if there is none."""
        return next((each for each in self.whole if (each.rank, each.step) == (rank, step)), None)

    def steps(self, rank: int) -> list[int]:
        """Returns the steps of a rank's complete snapshots."""
        return [each.step for each in self.whole if each.rank == rank]

    def discard(self, slot: int) -> None:
        """Makes the snapshot in a slot invalid, by clearing its header."""
        os.pwrite(self._descriptor, bytes(_SEALED_BYTES), slot * _STRIDE)

    def leave(self, slot: int) -> None:
        """Ends the caller's use of a chosen slot. If it is not sealed, it is free again."""
        self._being_written.discard(slot)

    def choose(self, rank: int, kept_step: int | None) -> int:
        """Chooses a slot for a new snapshot of a rank, and discards its content. It is the caller's until `leave`.

        Args:
            rank: the rank of the new snapshot.
            kept_step: the step of a snapshot that must not be overwritten; see `keepstep.protocol.snapshots`.
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
        """Returns the size of this object's mapping of a slot in bytes; 0 if it was not opened for writing yet."""
        return len(self._maps[slot]) if slot in self._maps else 0

    def open_for_writing(self, slot: int, num_bytes: int) -> mmap.mmap:
        """Returns the memory of a chosen slot, of at least ``num_bytes``. This object owns the mapping.

        The system allocates the memory page by page as it is written.

        Raises:
            OSError: the file cannot be resized or mapped.
        """
        view = self._maps.get(slot)
        if view is None or len(view) < num_bytes:
            end = _STRIDE * slot + _PAGE + num_bytes
            with self._lock:
                if os.fstat(self._descriptor).st_size < end:
                    os.ftruncate(self._descriptor, end)
            # Do not close the former mapping: a tensor may still use it. It ends with the last such tensor.
            view = self._maps[slot] = mmap.mmap(self._descriptor, num_bytes, offset=_STRIDE * slot + _PAGE)
        return view

    def seal(self, snapshot: WholeSnapshot) -> None:
        """Writes the header of a slot whose bytes are all written. From now on its snapshot is valid."""
        content = (snapshot.rank, snapshot.step, snapshot.num_bytes, snapshot.digest)
        header = _HEADER.pack(_MAGIC, *content)
        os.pwrite(self._descriptor, header + xxhash.xxh3_64_digest(header), snapshot.slot * _STRIDE)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, rank: int, step: int) -> mmap.mmap:
        """Maps the bytes of a snapshot, after checking them. The mapping is private; the caller must close it.

        Raises:
            RemoteProtocolError: there is no snapshot of this rank and step, or its checksum is wrong. Then the snapshot
                is discarded, so that the next recovery does without it.
        """
        found = self.find(rank, step)
        if found is None:
            raise RemoteProtocolError(f"there is no snapshot of rank {rank} at step {step} in memory")
        offset = _STRIDE * found.slot + _PAGE
        view = mmap.mmap(self._descriptor, found.num_bytes, access=mmap.ACCESS_COPY, offset=offset)
        if xxhash.xxh3_128_digest(view) == found.digest:
            return view
        view.close()
        self.discard(found.slot)
        raise RemoteProtocolError(f"the snapshot of rank {rank} at step {step} in memory has a wrong checksum")
