"""Where the pieces of a bucket lie: in its slot, and in the tensors that are here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from keepstep.protocol.transfer.boxes import Box
from keepstep.protocol.transfer.plan import Bucket, Piece

CHECKSUM_BYTES = 8
SLOT_EXTRA_BYTES = 64
"""Behind the bucket in each slot: its checksum, and what keeps the next slot on a cache line of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is here, or a block of one.

    Attributes:
        tensor: its memory; any strides.
        box: which block of the whole tensor it is.
    """

    tensor: torch.Tensor
    box: Box

    def block(self, box: Box) -> torch.Tensor:
        """The view of a block, given by its place in the whole tensor."""
        view = self.tensor
        for dim, (start, size) in enumerate(zip(box.seen_from(self.box).start, box.shape, strict=True)):
            view = view.narrow(dim, start, size)
        return view


def blocks_of(bucket: Bucket, held: Mapping[int, Sequence[Held]]) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece of a bucket, with the views of those tensors here that it is a block of.

    Args:
        bucket: whose pieces.
        held: by index of the tensor: what of it is here. Its box holds a piece or has nothing of it.
    """
    for piece in bucket.pieces:
        for each in held[piece.tensor]:
            if each.box.holds(piece.box):
                yield piece, each.block(piece.box)


def as_tensor(slot: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """The view of a piece in the slot of its bucket, in the shape of its block."""
    return slot[piece.offset : piece.offset + piece.num_bytes].view(dtype).view(piece.box.shape)
