"""Blocks of a tensor: held by a shard, needed by a consumer, or sent in one bucket."""

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
        """How many elements it has; one for a tensor without dimensions."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index behind it, along each dimension."""
        return tuple(map(int.__add__, self.start, self.shape))

    def holds(self, other: Box) -> bool:
        """Whether all of ``other`` lies in it."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__le__, other.stop, self.stop))

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a block of a tensor of this shape."""
        return (
            len(self.start) == len(self.shape) == len(shape)
            and min((*self.start, *self.shape), default=0) >= 0
            and whole(shape).holds(self)
        )

    def seen_from(self, outer: Box) -> Box:
        """The same block, its index counted from the beginning of ``outer``."""
        return Box(tuple(map(int.__sub__, self.start, outer.start)), self.shape)

    def cut(self, max_elements: int) -> Iterator[Box]:
        """Blocks of at most so many elements that are this one together, in row-major order.

        Each is as long as it can be along the first dimension in which a cut is needed.
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
    """All of a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def cells(boxes: Iterable[Box]) -> Iterator[Box]:
    """The grid of blocks that the edges of all ``boxes`` cut; each box is a union of them. Row-major order.

    Where the boxes lie in no grid (one half cut in two, the other whole) there are more cells than needed, never fewer.
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
