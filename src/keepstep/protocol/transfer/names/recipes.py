"""Recipes: how to assemble one tensor from blocks of others, without any arithmetic. Pure data.

::

    Concat(("q", "k", "v"))                                     # a fused tensor
    Concat((Shard("q", 0), Shard("k", 0), Shard("v", 0)))       # the part of one tensor-parallel rank
    Slice("qkv", 0, 0, 64)                                      # ... and back
    Transpose("w", (1, 0))
    Select(Chunk("experts.gate_up", 1, 0, 2), 0, 3)             # the gate of the fourth of some stacked experts

`resolve` applies a recipe to the shapes of the tensors that it names. It returns regions, which say which block of
which tensor is where in the new one. So a recipe does not depend on how these tensors are sharded, or packed into
buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from keepstep.errors import ConfigurationError, ShapeMismatch
from keepstep.protocol.transfer.boxes import Box, whole


class RecipeOperation(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the operations in a recipe."""


class Concat(RecipeOperation, frozen=True):
    """Concatenates tensors along a dimension, like ``torch.cat``."""

    parts: tuple[Recipe, ...]
    dim: int = 0


class Stack(RecipeOperation, frozen=True):
    """Stacks tensors of the same shape along a new dimension, like ``torch.stack``."""

    parts: tuple[Recipe, ...]
    dim: int = 0


class Slice(RecipeOperation, frozen=True):
    """Takes the indices from ``start`` up to, without, ``stop`` along a dimension."""

    of: Recipe
    dim: int
    start: int
    stop: int


class Chunk(RecipeOperation, frozen=True):
    """Takes one of ``num`` equal parts along a dimension. The index may be a placeholder of the rule
    (``"{expert}"``)."""

    of: Recipe
    dim: int
    index: int | str
    num: int


class Select(RecipeOperation, frozen=True):
    """Takes one index along a dimension and removes that dimension, like ``torch.select``. The index may be a
    placeholder of the rule (``"{expert}"``)."""

    of: Recipe
    dim: int
    index: int | str


class Transpose(RecipeOperation, frozen=True):
    """Reorders the dimensions, like ``torch.permute``."""

    of: Recipe
    dims: tuple[int, ...]


class Shard(RecipeOperation, frozen=True):
    """Takes the tensor-parallel rank's own part along a dimension. Only a `NameMap` knows the rank.

    With ``replicas`` above one, so many consecutive ranks have the same part. That is for key-value heads, if there are
    fewer heads than ranks.
    """

    of: Recipe
    dim: int
    replicas: int = 1


Recipe: TypeAlias = str | Concat | Stack | Slice | Chunk | Select | Transpose | Shard
"""A tensor's name, or an operation on recipes."""


def operands(recipe: Recipe) -> tuple[Recipe, ...]:
    """Returns the operands of an operation; none for a name."""
    match recipe:
        case str():
            return ()
        case Concat() | Stack():
            return recipe.parts
        case _:
            return (recipe.of,)


def names_in(recipe: Recipe) -> Iterator[str]:
    """Yields the names of tensors in a recipe, in its order."""
    if isinstance(recipe, str):
        yield recipe
    for each in operands(recipe):
        yield from names_in(each)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A block of one published tensor, and its place in the tensor that a recipe makes.

    Attributes:
        source: name of the published tensor.
        box: the block in the published tensor.
        at: the block in the made tensor.
        dims: for each dimension of the published tensor, the dimension of the made tensor that it becomes. None: it is
            removed, and the box has size 1 there. Other dimensions of the made tensor are new, with size 1 in ``at``.
    """

    source: str
    box: Box
    at: Box
    dims: tuple[int | None, ...]

    def cut(self, dim: int, start: int, stop: int) -> Region | None:
        """Returns the part between two indices along a dimension of the made tensor; None if it is empty."""
        first = max(start, self.at.start[dim])
        size = min(stop, self.at.stop[dim]) - first
        if size <= 0:
            return None
        at, skipped = _along(self.at, dim, first, size), first - self.at.start[dim]
        if dim not in self.dims:
            return dataclasses.replace(self, at=at)
        own = self.dims.index(dim)
        box = _along(self.box, own, self.box.start[own] + skipped, size)
        return dataclasses.replace(self, box=box, at=at)


@dataclasses.dataclass(frozen=True, slots=True)
class MadeTensor:
    """The result of a recipe: the shape of the made tensor, and the regions that fill it."""

    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    def cut(self, dim: int, start: int, stop: int) -> MadeTensor:
        """Returns the part between two indices along a dimension."""
        kept = [each for region in self.regions if (each := region.cut(dim, start, stop)) is not None]
        moved = tuple(
            dataclasses.replace(each, at=_along(each.at, dim, each.at.start[dim] - start, each.at.shape[dim]))
            for each in kept
        )
        return MadeTensor((*self.shape[:dim], stop - start, *self.shape[dim + 1 :]), moved)

    def block(self, box: Box) -> MadeTensor:
        """Returns one block as a tensor of its own."""
        made = self
        for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
            made = made.cut(dim, start, stop)
        return made


def resolve(recipe: Recipe, shape_of: Callable[[str], tuple[int, ...]]) -> MadeTensor:
    """Applies a recipe to the shapes of the published tensors.

    Args:
        recipe: a recipe without placeholders and `Shard`.
        shape_of: returns the shape of a published tensor. An error that it raises for an unknown name passes through.

    Raises:
        ShapeMismatch: an operation does not fit the shape of its operand. The message names the tensors.
        ConfigurationError: the recipe has no parts, or still contains a placeholder or `Shard`.
    """
    match recipe:
        case str():
            shape = shape_of(recipe)
            return MadeTensor(shape, (Region(recipe, whole(shape), whole(shape), tuple(range(len(shape)))),))
        case Concat() | Stack():
            return _joined(recipe, [resolve(part, shape_of) for part in recipe.parts])
        case _:
            return _applied(recipe, resolve(recipe.of, shape_of))


def _applied(recipe: Slice | Chunk | Select | Transpose | Shard, made: MadeTensor) -> MadeTensor:
    match recipe:
        case Transpose(dims=dims):
            _check(sorted(dims) == list(range(len(made.shape))), recipe, made)
            return _transposed(made, dims)
        case Slice(dim=dim, start=start, stop=stop):
            _check(0 <= dim < len(made.shape) and 0 <= start <= stop <= made.shape[dim], recipe, made)
            return made.cut(dim, start, stop)
        case Chunk(dim=dim, index=int(index), num=num):
            _check(0 <= dim < len(made.shape) and num > 0 and made.shape[dim] % num == 0, recipe, made)
            _check(0 <= index < num, recipe, made)
            size = made.shape[dim] // num
            return made.cut(dim, index * size, (index + 1) * size)
        case Select(dim=dim, index=int(index)):
            _check(0 <= dim < len(made.shape) and 0 <= index < made.shape[dim], recipe, made)
            return _without(made.cut(dim, index, index + 1), dim)
        case _:
            raise ConfigurationError(f"{recipe} stands in a rule of a name map, which says what it means")


def _check(fits: bool, operation: RecipeOperation, made: MadeTensor) -> None:
    if not fits:
        fields = [field for field in operation.__struct_fields__ if field not in ("of", "parts")]
        arguments = ", ".join(f"{field}={getattr(operation, field)}" for field in fields)
        raise ShapeMismatch(
            f"{type(operation).__name__}({arguments}) does not fit {_named(made)} of shape {list(made.shape)}"
        )


def _joined(recipe: Concat | Stack, parts: list[MadeTensor]) -> MadeTensor:
    if not parts:
        raise ConfigurationError(f"{type(recipe).__name__} has no parts")
    dim, is_stack = recipe.dim, isinstance(recipe, Stack)
    _check(0 <= dim < len(parts[0].shape) + is_stack, recipe, parts[0])
    if is_stack:
        _check_alike([part.shape for part in parts], recipe, parts)
        parts = [_with_new(part, dim) for part in parts]
    _check_alike([_dropped(part.shape, dim) for part in parts], recipe, parts)
    regions, done = [], 0
    for part in parts:
        for region in part.regions:
            at = _along(region.at, dim, region.at.start[dim] + done, region.at.shape[dim])
            regions.append(dataclasses.replace(region, at=at))
        done += part.shape[dim]
    shape = parts[0].shape
    return MadeTensor((*shape[:dim], done, *shape[dim + 1 :]), tuple(regions))


def _check_alike(shapes: list[tuple[int, ...]], recipe: Concat | Stack, parts: list[MadeTensor]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(f"{_named(part)} {list(part.shape)}" for part in parts)
        raise ShapeMismatch(f"{type(recipe).__name__} along dim {recipe.dim} does not fit its parts: {found}")


def _named(made: MadeTensor) -> str:
    return " and ".join(f"'{name}'" for name in dict.fromkeys(region.source for region in made.regions))


def _transposed(made: MadeTensor, dims: tuple[int, ...]) -> MadeTensor:
    def moved(region: Region) -> Region:
        at = Box(tuple(region.at.start[dim] for dim in dims), tuple(region.at.shape[dim] for dim in dims))
        return dataclasses.replace(
            region, at=at, dims=tuple(None if dim is None else dims.index(dim) for dim in region.dims)
        )

    return MadeTensor(tuple(made.shape[dim] for dim in dims), tuple(map(moved, made.regions)))


def _without(made: MadeTensor, dim: int) -> MadeTensor:
    """Removes a dimension of size 1."""

    def lowered(region: Region) -> Region:
        at = Box(_dropped(region.at.start, dim), _dropped(region.at.shape, dim))
        dims = (None if each is None or each == dim else each - (each > dim) for each in region.dims)
        return dataclasses.replace(region, at=at, dims=tuple(dims))

    return MadeTensor(_dropped(made.shape, dim), tuple(map(lowered, made.regions)))


def _with_new(made: MadeTensor, dim: int) -> MadeTensor:
    """Inserts a dimension of size 1."""

    def raised(region: Region) -> Region:
        start, shape = region.at.start, region.at.shape
        at = Box((*start[:dim], 0, *start[dim:]), (*shape[:dim], 1, *shape[dim:]))
        dims = (None if each is None else each + (each >= dim) for each in region.dims)
        return dataclasses.replace(region, at=at, dims=tuple(dims))

    return MadeTensor((*made.shape[:dim], 1, *made.shape[dim:]), tuple(map(raised, made.regions)))


def _dropped(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _along(box: Box, dim: int, start: int, size: int) -> Box:
    """Returns the box with another start and size along one dimension."""
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.shape[:dim], size, *box.shape[dim + 1 :]))
