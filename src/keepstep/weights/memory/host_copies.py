"""Copies between a slot in host memory and tensors.

A block that is one run of memory on both sides is copied as bytes; anything else (a column shard, a transposed
tensor, one of another dtype, a tensor on a GPU) by torch, element by element. The checksum is xxh3 over the bucket's
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash

from keepstep.protocol.transfer.plan import Bucket, Piece
from keepstep.weights.memory.bytes_of import copy_bytes
from keepstep.weights.memory.pieces import Held, as_tensor, blocks_of

BATCH_BYTES = 1 << 20
"""Bytes to copy before they are hashed, so that the hash reads from a cache. It is large enough for glibc to copy with
vector instructions. Below the size of the L2 cache (512 KiB on many AMD processors), glibc uses ``rep movsb``, which is
up to five times slower if both addresses have nearly the same offset in their pages (glibc bug 30994)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a bucket that is copied at a time.

    Attributes:
        end: offset in the slot of what follows it.
        run: (address in the slot, address of the tensor, bytes), or None.
        views: of the slot and of the tensor, where it is no run of memory.
    """

    end: int
    run: tuple[int, int, int] | None = None
    views: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclasses.dataclass(slots=True)
class _Batch:
    """Segments to copy, and the memory to hash afterwards, while it is in the processor's cache."""

    runs: list[tuple[int, int, int]]
    views: list[tuple[torch.Tensor, torch.Tensor]]
    memory: memoryview


class HostCopy:
    """Copies between one bucket's slot and the tensors here, and computes the bucket's checksum on the way."""

    def __init__(self, slot: torch.Tensor, bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> None:
        """Args:
        slot: uint8, memory of at least the bucket's size.
        bucket: whose pieces are copied.
        held: index of a tensor -> its local blocks. A block contains a piece completely or not at all.
        """
        self._batches = list(_batches(slot.numpy().data, _segments(slot, bucket, held)))

    def gather(self) -> bytes:
        """Tensors to slot; the checksum."""
        digest = xxhash.xxh3_64()
        for batch in self._batches:
            for slot, own, num_bytes in batch.runs:
                copy_bytes(slot, own, num_bytes)
            for in_slot, view in batch.views:
                in_slot.copy_(view)
            digest.update(batch.memory)
        return digest.digest()

    def scatter(self) -> bytes:
        """Slot to tensors; the checksum of what was in the slot."""
        digest = xxhash.xxh3_64()
        for batch in self._batches:
            for slot, own, num_bytes in batch.runs:
                copy_bytes(own, slot, num_bytes)
            for in_slot, view in batch.views:
                view.copy_(in_slot)
            digest.update(batch.memory)
        return digest.digest()


def _segments(slot: torch.Tensor, bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> Iterator[_Segment]:
    for piece, dtype, own in blocks_of(bucket, held):
        yield from _segments_of(slot, piece, dtype, own)


def _segments_of(slot: torch.Tensor, piece: Piece, dtype: torch.dtype, own: torch.Tensor) -> Iterator[_Segment]:
    if own.dtype != dtype or not _is_run_of_memory(own):
        yield _Segment(piece.offset + piece.num_bytes, views=(as_tensor(slot, piece, dtype), own))
        return
    begin, address = slot.data_ptr() + piece.offset, own.data_ptr()
    for done in range(0, piece.num_bytes, BATCH_BYTES):
        size = min(BATCH_BYTES, piece.num_bytes - done)
        yield _Segment(piece.offset + done + size, run=(begin + done, address + done, size))


def _is_run_of_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values in row-major order; a view that conjugates or negates has others."""
    is_plain = not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tensor.is_contiguous() and tensor.device.type == "cpu"


def _batches(memory: memoryview, segments: Iterable[_Segment]) -> Iterator[_Batch]:
    begin, end = 0, 0
    runs: list[tuple[int, int, int]] = []
    views: list[tuple[torch.Tensor, torch.Tensor]] = []
    for segment in segments:
        end = max(end, segment.end)
        if segment.run is not None:
            runs.append(segment.run)
        if segment.views is not None:
            views.append(segment.views)
        if end - begin >= BATCH_BYTES:
            yield _Batch(runs, views, memory[begin:end])
            begin, runs, views = end, [], []
    if end > begin:
        yield _Batch(runs, views, memory[begin:end])
