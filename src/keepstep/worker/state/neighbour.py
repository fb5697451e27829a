"""Reading a replica's tensors straight out of its process, where both live on one machine.

`process_vm_readv(2)` copies from another process's memory into one's own in a single copy, without buffers and
without the other's help; MPI libraries call it cross-memory attach. Where the kernel does not allow it (a container's
seccomp filter, another user or namespace) the transfer goes over the process group instead.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from keepstep.protocol.transfer.plan import Bucket, Piece

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


class _Run(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Run),
    ctypes.c_ulong,
    ctypes.POINTER(_Run),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a process lives: its number means the same only within one boot and pid namespace."""

    boot: str
    namespace: str
    pid: int


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source's tensors in its own memory; no addresses where the receiver is no neighbour."""

    place: Place
    addresses: tuple[int, ...]


def here() -> Place:
    """Where this process lives."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Place(boot, os.readlink("/proc/self/ns/pid"), os.getpid())


def offer_to(reader: Place, views: Sequence[torch.Tensor]) -> Offer:
    """What a source offers to a receiver. Under Yama's ptrace_scope=1 it also has to permit that one process."""
    place = here()
    if (reader.boot, reader.namespace) != (place.boot, place.namespace):
        return Offer(place, ())
    _libc.prctl(_PR_SET_PTRACER, reader.pid, 0, 0, 0)  # fails where Yama is not there, and is not needed then
    return Offer(place, tuple(view.data_ptr() for view in views))


def can_read(offer: Offer, views: Sequence[torch.Tensor]) -> bool:
    """Whether this process may read the source's memory: tries it on one byte."""
    present = next((index for index, view in enumerate(views) if view.numel()), None)
    if present is None or len(offer.addresses) != len(views):
        return False
    byte = torch.empty(1, dtype=torch.uint8)
    return _read(offer.place.pid, [(byte.data_ptr(), offer.addresses[present], 1)]) == 1


def run_of(views: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
    """The memory of a piece of a bucket, where tensors travel as runs of bytes."""
    (first,) = piece.box.start
    return views[piece.tensor][first : first + piece.num_bytes]


def read_bucket(offer: Offer, bucket: Bucket, views: Sequence[torch.Tensor]) -> None:
    """Copies one bucket from the source's tensors into this rank's.

    Raises:
        RuntimeError: the source is gone, or less came than was asked for.
    """
    runs = [
        (run_of(views, p).data_ptr(), offer.addresses[p.tensor] + p.box.start[0], p.num_bytes) for p in bucket.pieces
    ]
    limit = os.sysconf("SC_IOV_MAX")
    for start in range(0, len(runs), limit):
        part = runs[start : start + limit]
        copied = _read(offer.place.pid, part)
        if copied != sum(length for _to, _from, length in part):
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} bytes came"
            raise RuntimeError(f"bucket {bucket.index} could not be read from process {offer.place.pid}: {reason}")


def _read(pid: int, runs: Sequence[tuple[int, int, int]]) -> int:
    """Copies (own address, other's address, bytes) runs; returns the bytes copied, or -1."""
    own = (_Run * len(runs))(*[_Run(to, length) for to, _from, length in runs])
    other = (_Run * len(runs))(*[_Run(source, length) for _to, source, length in runs])
    return int(_libc.process_vm_readv(pid, own, len(runs), other, len(runs), 0))
