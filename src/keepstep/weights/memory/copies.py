"""Copies between the slot of a bucket and tensors, prepared once per plan, independent of the slot's device.

Checksums travel in the slot, after the bucket.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import xxhash

from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory import gpu_copies
from keepstep.weights.memory.gpu_copies import GpuCopy, on_stream
from keepstep.weights.memory.host_copies import HostCopy
from keepstep.weights.memory.pieces import CHECKSUM_BYTES, Held


class Copy(Protocol):
    """Copies between one bucket's slot and the local tensors, and computes the bucket's checksum."""

    def gather(self) -> bytes:
        """Copies tensors to the slot and returns the checksum. The copy is complete when it returns."""
        ...

    def scatter(self) -> bytes:
        """Copies the slot to tensors and returns the checksum of the slot's content."""
        ...


def copy_of(slot: torch.Tensor, bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> Copy:
    """Prepares the copies of a bucket.

    Args:
        slot: uint8, memory of at least the bucket's size.
        bucket: whose pieces are copied.
        held: index of a tensor -> its local blocks. A block contains a piece completely or not at all.
    """
    return GpuCopy(slot, bucket, held) if slot.is_cuda else HostCopy(slot, bucket, held)


def seal(slot: torch.Tensor, bucket: Bucket, checksum: bytes) -> None:
    """Writes the checksum of a bucket behind it."""
    if not slot.is_cuda:  # a torch operation would take ten times as long
        ctypes.memmove(slot.data_ptr() + bucket.num_bytes, checksum, CHECKSUM_BYTES)
        return
    with on_stream(slot.device):
        _checksum_place(slot, bucket).copy_(torch.frombuffer(bytearray(checksum), dtype=torch.uint8))


def checksum_in(slot: torch.Tensor, bucket: Bucket) -> bytes:
    """The checksum that was written after a bucket."""
    if not slot.is_cuda:
        return ctypes.string_at(slot.data_ptr() + bucket.num_bytes, CHECKSUM_BYTES)
    with on_stream(slot.device):
        return _checksum_place(slot, bucket).cpu().numpy().tobytes()


def checksum_of(slot: torch.Tensor, bucket: Bucket) -> bytes:
    """The checksum of the bucket that is in a slot."""
    content = slot[: bucket.num_bytes]
    if not slot.is_cuda:
        return xxhash.xxh3_64_digest(content.numpy().data)
    with on_stream(slot.device):
        return gpu_copies.checksum(content)


def _checksum_place(slot: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    return slot[bucket.num_bytes : bucket.num_bytes + CHECKSUM_BYTES]
