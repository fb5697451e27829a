"""Recipes, compared with what torch makes of them: each element comes from where torch takes it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigurationError, ShapeMismatch
from keepstep.protocol.transfer.boxes import Box
from keepstep.protocol.transfer.names.recipes import (
    Chunk,
    Concat,
    MadeTensor,
    Recipe,
    Select,
    Shard,
    Slice,
    Stack,
    Transpose,
    names_in,
    resolve,
)

Tensors = dict[str, torch.Tensor]


def evaluated(recipe: Recipe, tensors: Tensors) -> torch.Tensor:
    """The oracle: torch's own operations on whole tensors."""
    match recipe:
        case str():
            return tensors[recipe]
        case Concat(parts=parts, dim=dim):
            return torch.cat([evaluated(part, tensors) for part in parts], dim)
        case Stack(parts=parts, dim=dim):
            return torch.stack([evaluated(part, tensors) for part in parts], dim)
        case Slice(of=of, dim=dim, start=start, stop=stop):
            return evaluated(of, tensors).narrow(dim, start, stop - start)
        case Chunk(of=of, dim=dim, index=int(index), num=num):
            return evaluated(of, tensors).chunk(num, dim)[index]
        case Select(of=of, dim=dim, index=int(index)):
            return evaluated(of, tensors).select(dim, index)
        case Transpose(of=of, dims=dims):
            return evaluated(of, tensors).permute(dims)
    raise AssertionError(recipe)


def assembled(made: MadeTensor, tensors: Tensors) -> torch.Tensor:
    """What the regions say, element by element; -1 where none is, and an error where two are."""
    out = torch.full(made.shape, -1)
    for region in made.regions:
        for number in range(region.box.num_elements):
            rest, index = number, []
            for size in reversed(region.box.shape):
                rest, offset = divmod(rest, size)
                index.insert(0, offset)
            at = list(region.at.start)
            for dim, to in enumerate(region.dims):
                if to is not None:
                    at[to] += index[dim]
            source = tuple(map(int.__add__, region.box.start, index))
            assert out[tuple(at)] == -1
            out[tuple(at)] = tensors[region.source][source]
    return out


class Drawn:
    """Tensors whose elements are all different, and recipes of them."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.tensors: Tensors = {}
        self._next = 0

    def tensor(self, shape: tuple[int, ...]) -> str:
        name = f"t{len(self.tensors)}"
        count = math.prod(shape)
        self.tensors[name] = torch.arange(self._next, self._next + count).reshape(shape)
        self._next += count
        return name

    def of_shape(self, shape: tuple[int, ...], depth: int) -> Recipe:
        """A recipe that makes this shape."""
        kinds = ["name"]
        if depth:
            kinds += ["select", "transpose"]
            if shape:
                kinds += ["concat", "slice", "chunk", "stack"]
        kind, dim = self.draw(st.sampled_from(kinds)), self.draw(st.integers(0, max(0, len(shape) - 1)))
        others = (shape[:dim], shape[dim + 1 :])
        if kind == "select":
            size = self.draw(st.integers(1, 3))
            of = self.of_shape((*shape[:dim], size, *shape[dim:]), depth - 1)
            return Select(of, dim, self.draw(st.integers(0, size - 1)))
        if kind == "transpose":
            dims = self.draw(st.permutations(range(len(shape))))
            before = [0] * len(shape)
            for to, each in enumerate(dims):
                before[each] = shape[to]
            return Transpose(self.of_shape(tuple(before), depth - 1), tuple(dims))
        if kind == "stack":
            return Stack(tuple(self.of_shape((*others[0], *others[1]), depth - 1) for _ in range(shape[dim])), dim)
        if kind == "concat":
            cut = self.draw(st.integers(0, shape[dim]))
            parts = [size for size in (cut, shape[dim] - cut) if size]
            return Concat(tuple(self.of_shape((*others[0], size, *others[1]), depth - 1) for size in parts), dim)
        if kind == "slice":
            before, after = self.draw(st.integers(0, 2)), self.draw(st.integers(0, 2))
            of = self.of_shape((*others[0], before + shape[dim] + after, *others[1]), depth - 1)
            return Slice(of, dim, before, before + shape[dim])
        if kind == "chunk":
            num = self.draw(st.integers(1, 3))
            of = self.of_shape((*others[0], num * shape[dim], *others[1]), depth - 1)
            return Chunk(of, dim, self.draw(st.integers(0, num - 1)), num)
        return self.tensor(shape)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Recipe, Tensors]:
    made = Drawn(draw)
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    return made.of_shape(shape, draw(st.integers(0, 4))), made.tensors


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@given(drawn())
def test_a_recipe_makes_what_torch_makes(case: tuple[Recipe, Tensors]) -> None:
    recipe, tensors = case
    made, expected = resolve(recipe, shapes(tensors).__getitem__), evaluated(recipe, tensors)
    assert made.shape == tuple(expected.shape)
    assert torch.equal(assembled(made, tensors), expected)


@given(drawn(), st.data())
def test_a_block_of_it_is_a_block_of_what_torch_makes(case: tuple[Recipe, Tensors], data: st.DataObject) -> None:
    recipe, tensors = case
    made, expected = resolve(recipe, shapes(tensors).__getitem__), evaluated(recipe, tensors)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in made.shape)
    size = tuple(data.draw(st.integers(1, end - first)) for first, end in zip(start, made.shape, strict=True))
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        expected = expected.narrow(dim, first, length)
    assert torch.equal(assembled(made.block(Box(start, size)), tensors), expected)


SHAPES = {"a": (4, 6), "b": (2, 6), "c": (4, 5), "v": (4,)}


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (Concat(("a", "b"), 1), r"Concat along dim 1 does not fit its parts: 'a' \[4, 6\], 'b' \[2, 6\]"),
        (Concat(("a", "v"), 0), r"Concat along dim 0 .* 'a' \[4, 6\], 'v' \[4\]"),
        (Concat(("a", "b"), 2), r"Concat\(dim=2\) does not fit 'a' of shape \[4, 6\]"),
        (Concat(("a", "b"), -1), r"Concat\(dim=-1\) does not fit 'a'"),
        (Stack(("a", "c")), r"Stack along dim 0 does not fit its parts: 'a' \[4, 6\], 'c' \[4, 5\]"),
        (Slice("a", 0, 1, 5), r"Slice\(dim=0, start=1, stop=5\) does not fit 'a' of shape \[4, 6\]"),
        (Slice("a", 0, -1, 2), "does not fit 'a'"),
        (Chunk("a", 1, 0, 4), r"Chunk\(dim=1, index=0, num=4\) does not fit 'a' of shape \[4, 6\]"),
        (Chunk("a", 1, 2, 2), "does not fit 'a'"),
        (Chunk("a", 1, 0, 0), "does not fit 'a'"),
        (Select("a", 0, 4), r"Select\(dim=0, index=4\) does not fit 'a'"),
        (Transpose("a", (0, 0)), r"Transpose\(dims=\(0, 0\)\) does not fit 'a'"),
        (Slice(Concat(("a", "b")), 0, 0, 7), "does not fit 'a' and 'b' of shape"),
    ],
)
def test_an_operation_that_does_not_fit_names_the_tensors(recipe: Recipe, told: str) -> None:
    with pytest.raises(ShapeMismatch, match=told):
        resolve(recipe, SHAPES.__getitem__)


@pytest.mark.parametrize("recipe", [Shard("a", 0), Select("a", 0, "{e}"), Concat(()), Stack(())])
def test_what_only_a_rule_can_say_is_refused_in_a_resolved_recipe(recipe: Recipe) -> None:
    with pytest.raises(ConfigurationError):
        resolve(recipe, SHAPES.__getitem__)


def test_the_names_of_a_recipe_come_in_its_order() -> None:
    assert list(names_in(Concat(("b", Slice("a", 0, 0, 1), Stack(("c", "b")))))) == ["b", "a", "c", "b"]
