"""Tensors that a consumer quantizes: assembled first, because a scale needs its complete block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.protocol.transfer.boxes import whole
from keepstep.protocol.transfer.plan import Bucket
from keepstep.weights.memory.mapping.mapped import IncomingPart, Placed, blocks_along
from keepstep.weights.memory.pieces import Held


class Staged:
    """One tensor on its way. Its memory is taken with its first part and given back with its last."""

    def __init__(self, placed: Placed, like: torch.Tensor, places: Sequence[IncomingPart]) -> None:
        """Args:
        placed: what it is; it has scales.
        like: the consumer's tensor, for its shape and device.
        places: its parts; they fill it.
        """
        self._placed, self._like, self._places = placed, like, places
        self._values: torch.Tensor | None = None
        self._missing = 0

    def forget(self) -> None:
        """What has come of it is not used: another version comes."""
        self._values = None

    def held(self) -> dict[int, list[Held]]:
        """Where its parts go, by index of the published tensor."""
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
        """A bucket's parts have been copied; with the last one the tensor and its scales are written.

        Args:
            bucket: which.
            tensors: the set that is filled.
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
        into: the same shape, float8.
        scales: float32, one for each block, counted from the first index; a block of zeros has scale 1.
        block: shape of a block; None: one for all.
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
