"""Weights under a name map: the blocks of published tensors that a consumer's tensors need, and their places.

A publisher may use the same rules to map its own tensors to the published ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from keepstep.errors import AmbiguousName, DtypeMismatch, MissingPart, ShapeMismatch, UnknownTensor
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import Want
from keepstep.protocol.transfer.names.name_map import Conversion, Convert, NameMap, Quantize
from keepstep.protocol.transfer.names.recipes import Recipe, Region, resolve
from keepstep.protocol.transfer.plan import Part
from keepstep.weights.memory.blocks import NamedBlock, Weights, named_blocks
from keepstep.weights.memory.pieces import Held

_PLAIN = NameMap(())


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """Weights with a name map to the tensors of the other side.

    For a `Subscriber`, the map's rules make its tensors (or blocks of them) from those that are published. For a
    `Publisher`, they make what is published from its own tensors; those that no rule uses keep their names.

    Attributes:
        weights: a module, or tensors and blocks by name.
        names: the rules.
    """

    weights: Weights
    names: NameMap


@dataclasses.dataclass(frozen=True, slots=True)
class ReturnedWeights:
    """Blocks of a version that a consumer holds, under the names under which it was published.

    Attributes:
        blocks: the blocks, in the consumer's memory.
    """

    blocks: tuple[NamedBlock, ...]


def plain(weights: Weights | Mapped | ReturnedWeights) -> tuple[Weights, NameMap]:
    """The weights, and their map, which is empty if there is none."""
    if isinstance(weights, ReturnedWeights):
        return {str(number): block.held.tensor for number, block in enumerate(weights.blocks)}, _PLAIN
    return (weights.weights, weights.names) if isinstance(weights, Mapped) else (weights, _PLAIN)


# ---- a consumer -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A consumer's tensor with its request.

    Attributes:
        index: index of the tensor among the consumer's.
        want: the request.
        scale: index of the tensor with its scales, if it is quantized.
    """

    index: int
    want: Want
    scale: int | None

    @property
    def block(self) -> tuple[int, ...] | None:
        """Shape of the blocks that have a scale each; None: one scale."""
        return self.want.convert.block if isinstance(self.want.convert, Quantize) else None


@dataclasses.dataclass(frozen=True, slots=True)
class IncomingPart:
    """The destination of one incoming part in a consumer's tensor.

    Attributes:
        region: region of the consumer's tensor.
        part: the part of a published tensor.
        dtype: dtype of the part in buckets.
    """

    region: Region
    part: Part
    dtype: torch.dtype

    def held(self, tensor: torch.Tensor) -> Held:
        """The same in the memory of a tensor."""
        return Held(view_of(tensor, self.region), self.part.box, self.dtype)


def wants_of(blocks: Sequence[NamedBlock], names: NameMap) -> list[Placed]:
    """The requests of a consumer, in the order of its tensors. It requests no scales, because it computes them.

    Raises:
        AmbiguousName: two rules make the same tensor.
        UnknownTensor: the tensor with a quantized tensor's scales does not exist.
        ShapeMismatch: the scales do not have one element per block.
        DtypeMismatch: the scales are not float32, or the quantized tensor is not float8.
    """
    found, scales = [], set[int]()
    by_name = {name: index for index, block in enumerate(blocks) for name in block.names}
    for index, block in enumerate(blocks):
        recipe, convert = _rule_of(block, names)
        scale = _scale_of(block, convert, blocks, by_name) if isinstance(convert, Quantize) else None
        if scale is not None:
            scales.add(scale)
        found.append(Placed(index, block.as_want(recipe, convert), scale))
    return [placed for placed in found if placed.index not in scales]


def _rule_of(block: NamedBlock, names: NameMap) -> tuple[Recipe | None, Convert]:
    """The recipe and conversion of a block: the first of its names that has a rule determines them."""
    made = [names.made_of(name) for name in block.names]
    return next((each for each in made if each[0] is not None), made[0])


def _scale_of(block: NamedBlock, convert: Quantize, blocks: Sequence[NamedBlock], by_name: Mapping[str, int]) -> int:
    name, tensor = block.names[0], block.held.tensor
    if convert.scale not in by_name:
        raise UnknownTensor(f"'{name}' is quantized, and there is no '{convert.scale}' for its scales")
    if not tensor.is_floating_point() or tensor.element_size() != 1:
        raise DtypeMismatch(f"'{name}' is {block.dtype}, and quantized is to float8 alone")
    index = by_name[convert.scale]
    scales, per = blocks[index], convert.block
    if scales.dtype != "float32":
        raise DtypeMismatch(f"the scales '{convert.scale}' of '{name}' are {scales.dtype}, and not float32")
    shape = tuple(scales.held.tensor.shape)
    if per is not None and (len(per) != tensor.dim() or min(per, default=1) < 1):
        raise ShapeMismatch(f"'{name}' of shape {list(tensor.shape)} has no blocks of shape {list(per)}")
    allowed = [(), (1,)] if per is None else [tuple(map(blocks_along, tensor.shape, per))]
    if shape not in allowed:
        raise ShapeMismatch(f"the scales '{convert.scale}' of '{name}' are {list(shape)}, and {list(allowed[0])} fits")
    return index


def blocks_along(size: int, per: int) -> int:
    """Number of blocks of ``per`` indices in ``size``; the last one may be shorter."""
    return -(-size // per)


def view_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A view of a region of a consumer's tensor, with the dimensions of the published tensor."""
    view = Held(tensor, whole(tuple(tensor.shape))).block(region.at)
    kept = [dim for dim in region.dims if dim is not None]
    new = [dim for dim in range(view.dim()) if dim not in kept]
    view = view.permute((*kept, *new))
    for _ in new:
        view = view.squeeze(-1)
    for dim, to in enumerate(region.dims):
        if to is None:
            view = view.unsqueeze(dim)
    return view


# ---- a publisher ----------------------------------------------------------------------------------------------------


def published_blocks(weights: Weights | Mapped | ReturnedWeights) -> list[NamedBlock]:
    """The blocks that a publisher offers: its tensors, or the results of its rules.

    Raises:
        AmbiguousName: two rules make the same tensor.
        MissingPart: this device holds some, but not all, source tensors of a rule.
        DtypeMismatch: the parts of a tensor have different dtypes, or a rule converts, which only consumers may do.
        ConfigurationError: as `keepstep.weights.memory.blocks.named_blocks`.
    """
    if isinstance(weights, ReturnedWeights):
        return list(weights.blocks)
    own, names = plain(weights)
    blocks = named_blocks(own)
    by_name = {name: block for block in blocks for name in block.names}
    made: dict[str, str] = {}
    used: set[int] = set()
    found: list[NamedBlock] = []
    for rule in names.rules:
        if names.convert is not Conversion.EXACT or (rule.convert or Conversion.EXACT) is not Conversion.EXACT:
            raise DtypeMismatch(
                f"the rule for '{rule.to}' converts: a consumer declares that, and a publisher does not"
            )
        for name in names.made_by(rule, by_name):
            if name in made:
                raise AmbiguousName(
                    f"'{name}' is made by several rules of the name map: '{made[name]}' and '{rule.to}'"
                )
            made[name] = rule.to
            recipe, _convert = names.made_of(name)
            assert recipe is not None
            parts = list(_made_blocks(name, recipe, by_name))
            used |= {id(block) for block, _made in parts}
            found += [each for _block, each in parts if each is not None]
    return [*(block for block in blocks if id(block) not in used), *found]


def _made_blocks(
    name: str, recipe: Recipe, by_name: Mapping[str, NamedBlock]
) -> Iterator[tuple[NamedBlock, NamedBlock | None]]:
    """Yields each source block of a rule, and its part of the resulting tensor; None if it has no part in it."""

    def shape_of(source: str) -> tuple[int, ...]:
        if source not in by_name:
            raise MissingPart(f"'{name}' cannot be published: its part '{source}' is not held here")
        return by_name[source].whole

    made = resolve(recipe, shape_of)
    dtypes = {by_name[region.source].dtype for region in made.regions}
    if len(dtypes) > 1:
        raise DtypeMismatch(f"'{name}' cannot be published: its parts are {sorted(dtypes)}")
    for whole_region in made.regions:
        block = by_name[whole_region.source]
        region = _held_part(whole_region, block.held.box)
        if region is None:
            yield block, None
        else:
            held = Held(_turned(block.held.block(region.box), region, len(made.shape)), region.at)
            yield block, NamedBlock((name,), held, made.shape, block.owners)


def _held_part(region: Region, held: Box) -> Region | None:
    """The part of a region that a block of its source contains; None if it contains nothing of it."""
    found: Region | None = region
    for dim, to in enumerate(region.dims):
        skipped = held.start[dim] - region.box.start[dim]
        if to is None:
            if not held.start[dim] <= region.box.start[dim] < held.stop[dim]:
                return None
        elif found is not None:
            first = region.at.start[to] + skipped
            found = found.cut(to, first, first + held.shape[dim])
    return found


def _turned(view: torch.Tensor, region: Region, num_dims: int) -> torch.Tensor:
    """A view of a source's block with the dimensions of the resulting tensor."""
    kept = sorted((to, dim) for dim, to in enumerate(region.dims) if to is not None)
    gone = [dim for dim, to in enumerate(region.dims) if to is None]
    view = view.permute((*(dim for _to, dim in kept), *gone))
    for _ in gone:
        view = view.squeeze(-1)
    for to in range(num_dims):
        if to not in region.dims:
            view = view.unsqueeze(to)
    return view
