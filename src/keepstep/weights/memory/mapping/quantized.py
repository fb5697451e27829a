"""Tensors that a consumer quantizes: assembled first, because a scale needs its complete block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.protocol.transfer.boxes import whole
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.mapping.mapped import IncomingPart, Placed, blocks_along
from keepstep.weights.memory.pieces import Held


class Staged:
    """Assembles one quantized tensor. The memory is allocated with the first part and freed with the last."""

    def __init__(self, placed: Placed, like: torch.Tensor, places: Sequence[IncomingPart]) -> None:
        """Args:
        placed: the consumer's tensor with its request. It has scales.
        like: the consumer's tensor, for shape and device.
        places: the parts of the tensor. Together they fill it.
        """
        self._placed, self._like, self._places = placed, like, places
        self._values: torch.Tensor | None = None
        self._missing = 0

    def forget(self) -> None:
        """Drops the received parts, because another version begins."""
        self._values = None

    def held(self) -> dict[int, list[Held]]:
        """The destinations of the parts, by index of the published tensor. Allocates the memory."""
        if self._values is None:
            dtypes = {place.dtype for place in self._places}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            self._values = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
            self._missing = self._values.numel()
        found: dict[int, list[Held]] = {}
        for place in self._places:
            found.setdefault(place.part.tensor, []).append(place.held(self._values))
        return found

    def came(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Call it when a bucket's parts have been copied. After the last part it writes the tensor and its scales.

        Args:
            bucket: the bucket.
            tensors: the set of the consumer's tensors to write.
        """
        for piece in bucket.pieces:
            parts = [place.part for place in self._places if place.part.tensor == piece.tensor]
            self._missing -= sum(piece.box.num_elements for part in parts if part.box.holds(piece.box))
        if not self._missing and self._values is not None:
            assert self._placed.scale is not None
            quantize(self._values, tensors[self._placed.index], tensors[self._placed.scale], self._placed.block)
            self._values = None


def quantize(values: torch.Tensor, into: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None) -> None:
    """Writes values as float8, and the scales by which to multiply them.

    Args:
        values: [n, ...], of any floating dtype.
        into: destination of the same shape, float8.
        scales: destination of the scales, float32, one per block. A block of zeros gets scale 1.
        block: shape of a block; None uses one scale for the whole tensor.
    """
    wide, largest = values.float(), torch.finfo(into.dtype).max
    if block is None:
        block = tuple(max(size, 1) for size in values.shape)
    padding = [(-size) % per for size, per in zip(values.shape, block, strict=True)]
    padded = torch.nn.functional.pad(wide, [each for size in reversed(padding) for each in (0, size)])
    grid = [blocks_along(size, per) for size, per in zip(values.shape, block, strict=True)]
    split = padded.reshape([size for pair in zip(grid, block, strict=True) for size in pair])
    peaks = split.abs().amax(dim=tuple(range(1, split.dim(), 2)), keepdim=True) if split.dim() else split.abs()
    scale = torch.where(peaks > 0, peaks / largest, torch.ones_like(peaks))
    scaled = (split / scale).reshape(padded.shape)
    into.copy_(Held(scaled, whole(tuple(padded.shape))).block(whole(tuple(values.shape))))
    scales.copy_(scale.reshape(scales.shape))
