"""Blocks of a tensor, as a shard holds them, a consumer wants them, or a bucket carries them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import msgspec


class Box(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor: its first index and its size along each dimension, counted in elements."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index after the block, along each dimension."""
        return tuple(map(int.__add__, self.start, self.shape))

    def holds(self, other: Box) -> bool:
        """Returns whether this block contains all of ``other``."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__le__, other.stop, self.stop))

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Returns whether this is a block of a tensor of this shape."""
        return (
            len(self.start) == len(self.shape) == len(shape)
            and min((*self.start, *self.shape), default=0) >= 0
            and whole(shape).holds(self)
        )

    def seen_from(self, outer: Box) -> Box:
        """Returns the same block with its start relative to that of ``outer``."""
        return Box(tuple(map(int.__sub__, self.start, outer.start)), self.shape)

    def cut(self, max_elements: int) -> Iterator[Box]:
        """Yields blocks of at most ``max_elements`` elements that together are this block, in row-major order.

        Each is as long as possible along the first dimension that must be cut.
        """
        if self.num_elements <= max_elements:
            yield self
            return
        dim = next(index for index, size in enumerate(self.shape) if size > 1)
        per_row = math.prod(self.shape[dim + 1 :])
        num_rows = max(1, max_elements // per_row)
        for first in range(0, self.shape[dim], num_rows):
            size = min(num_rows, self.shape[dim] - first)
            part = self._with(dim, self.start[dim] + first, size)
            yield from part.cut(max_elements)

    def _with(self, dim: int, start: int, size: int) -> Box:
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]), (*self.shape[:dim], size, *self.shape[dim + 1 :])
        )


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the block that is a whole tensor of this shape."""
    return Box((0,) * len(shape), shape)


def cells(boxes: Iterable[Box]) -> Iterator[Box]:
    """Yields the cells of the grid that the edges of all ``boxes`` make, in row-major order.

    Each box is a union of cells. If the boxes do not form a grid (one half cut in two, the other whole), there are more
    cells than needed.
    """
    boxes = list(boxes)
    if not boxes:
        return
    edges = [
        sorted({edge for box in boxes for edge in (box.start[dim], box.start[dim] + box.shape[dim])})
        for dim in range(len(boxes[0].shape))
    ]
    for corner in itertools.product(*(range(len(along) - 1) for along in edges)):
        start = tuple(along[index] for along, index in zip(edges, corner, strict=True))
        stop = tuple(along[index + 1] for along, index in zip(edges, corner, strict=True))
        yield Box(start, tuple(map(int.__sub__, stop, start)))
