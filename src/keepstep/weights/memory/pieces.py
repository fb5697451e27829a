"""The places of a bucket's pieces: in its slot, and in the local tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from keepstep.protocol.transfer.boxes import Box
from keepstep.protocol.transfer.plan import Bucket, Piece

CHECKSUM_BYTES = 8
SLOT_EXTRA_BYTES = 64
"""Bytes after the bucket in each slot: its checksum, and padding so that the next slot begins on its own cache line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A local tensor, or a local block of a tensor.

    Attributes:
        tensor: the memory; any strides.
        box: offset and size of the block in the whole tensor.
        travels_as: dtype of the tensor in buckets; None: its own. The copy casts it.
    """

    tensor: torch.Tensor
    box: Box
    travels_as: torch.dtype | None = None

    @property
    def dtype_in_slot(self) -> torch.dtype:
        """The dtype that it has in buckets."""
        return self.tensor.dtype if self.travels_as is None else self.travels_as

    def block(self, box: Box) -> torch.Tensor:
        """The view of a block, given by its place in the whole tensor."""
        view = self.tensor
        for dim, (start, size) in enumerate(zip(box.seen_from(self.box).start, box.shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view


def blocks_of(bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> Iterator[tuple[Piece, torch.dtype, torch.Tensor]]:
    """Each piece of a bucket and its dtype there, with the views of those tensors here that it is a block of.

    Args:
        bucket: whose pieces.
        held: index of a tensor -> its local blocks. A block contains a piece completely or not at all.
    """
    for piece in bucket.pieces:
        for each in held[piece.tensor]:
            if each.box.holds(piece.box):
                yield piece, each.dtype_in_slot, each.block(piece.box)


def as_tensor(slot: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """The view of a piece in the slot of its bucket, in the shape of its block."""
    return slot[piece.offset : piece.offset + piece.num_bytes].view(dtype).view(piece.box.shape)
