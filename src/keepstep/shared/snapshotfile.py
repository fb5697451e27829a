"""The memory for snapshots: a file of two slots that a worker writes, and its agent holds open as well.

The agent makes it, as it makes the tag page, so a snapshot outlives the worker, and a replacement on the same node can
read it. It is an anonymous file in memory, and nothing is left behind when both are gone. A slot that was never
written takes no memory, and one that grows takes what it needs: the slots lie far apart in a sparse file.

A slot begins with its header, in a page of its own. It is taken away before the slot is written, and written when all
the rest is there: whenever the worker dies, a header that can be read stands in front of a whole snapshot.
"""

from __future__ import annotations

import mmap
import os
import struct

import xxhash

from keepstep.errors import RemoteProtocolError

NUM_SLOTS = 2
"""One holds the newest snapshot while the next one is written into the other."""
_STRIDE = 1 << 44
"""From one slot to the next: more than any machine has."""
_HEADER = struct.Struct("<8sqQ16s")
"""Magic, step, bytes of the snapshot, and their xxh3 of 128 bits."""
_SEALED_BYTES = _HEADER.size + 8
"""With the xxh3 of 64 bits of the header itself."""
_MAGIC = b"ksslot01"
_PAGE = mmap.PAGESIZE


def create(name: str) -> int:
    """Makes the file and returns its descriptor, which the caller owns.

    Args:
        name: shows in ``/proc/PID/fd`` only; it is no path and nothing can open it by it.
    """
    descriptor = os.memfd_create(f"keepstep-{name}", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _STRIDE * (NUM_SLOTS - 1) + _PAGE)
    return descriptor


def held_steps(descriptor: int) -> tuple[int, ...]:
    """The steps of the whole snapshots in the file, ascending. Reads the headers only."""
    headers = (_read_header(descriptor, slot) for slot in range(NUM_SLOTS))
    return tuple(sorted(header[0] for header in headers if header is not None))


def _read_header(descriptor: int, slot: int) -> tuple[int, int, bytes] | None:
    sealed = os.pread(descriptor, _SEALED_BYTES, slot * _STRIDE)
    header, checksum = sealed[: _HEADER.size], sealed[_HEADER.size :]
    if len(sealed) < _SEALED_BYTES or checksum != xxhash.xxh3_64_digest(header):
        return None
    magic, step, num_bytes, digest = _HEADER.unpack(header)
    return (step, num_bytes, digest) if magic == _MAGIC else None


class SnapshotFile:
    """One end's view of the file. A worker has one thread at a time write to it."""

    def __init__(self, descriptor: int) -> None:
        """Args:
        descriptor: of the file; this object closes it when it goes.
        """
        self._descriptor = descriptor
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def steps(self) -> dict[int, int]:
        """The step of the whole snapshot in each slot that has one."""
        headers = {slot: _read_header(self._descriptor, slot) for slot in range(NUM_SLOTS)}
        return {slot: header[0] for slot, header in headers.items() if header is not None}

    def discard(self, slot: int) -> None:
        """What is in a slot counts no more."""
        os.pwrite(self._descriptor, bytes(_SEALED_BYTES), slot * _STRIDE)

    def capacity(self, slot: int) -> int:
        """How many bytes a slot has had memory for until now."""
        return len(self._maps[slot]) if slot in self._maps else 0

    def open_for_writing(self, slot: int, num_bytes: int) -> mmap.mmap:
        """Discards what is in a slot, and gives its memory, of at least ``num_bytes``. The view stays this object's.

        The memory is taken page by page as it is written.

        Raises:
            OSError: the system does not give it.
        """
        self.discard(slot)
        view = self._maps.get(slot)
        if view is None or len(view) < num_bytes:
            end = _STRIDE * slot + _PAGE + num_bytes
            if os.fstat(self._descriptor).st_size < end:
                os.ftruncate(self._descriptor, end)
            # The former view is not closed: a tensor that was made of it may be left. It ends with the last of them.
            view = self._maps[slot] = mmap.mmap(self._descriptor, num_bytes, offset=_STRIDE * slot + _PAGE)
        return view

    def seal(self, slot: int, step: int, num_bytes: int, digest: bytes) -> None:
        """All bytes are in the slot: from now on its snapshot counts.

        Args:
            slot: the one that was opened.
            step: whose forward reads these parameters.
            num_bytes: of the snapshot.
            digest: the 16 bytes of xxh3_128 over them.
        """
        header = _HEADER.pack(_MAGIC, step, num_bytes, digest)
        os.pwrite(self._descriptor, header + xxhash.xxh3_64_digest(header), slot * _STRIDE)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, step: int) -> mmap.mmap:
        """The bytes of a snapshot, to be read only; the caller closes the view.

        Raises:
            RemoteProtocolError: there is no snapshot of this step, or its checksum is wrong.
        """
        for slot in range(NUM_SLOTS):
            header = _read_header(self._descriptor, slot)
            if header is None or header[0] != step:
                continue
            _, num_bytes, digest = header
            view = mmap.mmap(
                self._descriptor, num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=_STRIDE * slot + _PAGE
            )
            if xxhash.xxh3_128_digest(view) == digest:
                return view
            view.close()
            raise RemoteProtocolError(f"the snapshot of step {step} in memory has a wrong checksum")
        raise RemoteProtocolError(f"there is no snapshot of step {step} in memory")
