"""Published or requested weights as named blocks of tensors: modules, state dicts, DTensors, manual shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import HeldPart, Want
from keepstep.protocol.transfer.names.name_map import Conversion, Convert
from keepstep.protocol.transfer.names.recipes import Recipe
from keepstep.protocol.transfer.plan import TensorForm
from keepstep.typenames import is_named
from keepstep.weights.memory.bytes_of import other_than_memory
from keepstep.weights.memory.pieces import Held

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block of a larger tensor, such as a tensor-parallel or fully sharded rank's.

    Attributes:
        tensor: the block itself; any strides.
        start: its first index in the whole tensor.
        whole: the shape of the whole tensor.
    """

    tensor: torch.Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(self.start))
        object.__setattr__(self, "whole", tuple(self.whole))
        box = Box(self.start, tuple(self.tensor.shape))
        if not box.lies_in(self.whole):
            raise ConfigurationError(
                f"a block of shape {list(self.tensor.shape)} from {list(self.start)} on does not lie in a tensor of "
                f"shape {list(self.whole)}"
            )


Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor | Block]
"""A module (its parameters and persistent buffers), or tensors and blocks by name; DTensors are taken for blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedBlock:
    """One entry of some weights; tied ones are one entry with several names.

    Attributes:
        names: of the entry, in their order.
        held: its memory, and which block of the whole tensor it is.
        whole: shape of the whole tensor.
        owners: the user's own tensors that this memory belongs to.
    """

    names: tuple[str, ...]
    held: Held
    whole: tuple[int, ...]
    owners: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> str:
        """As torch calls it, without ``torch.``."""
        return str(self.held.tensor.dtype).removeprefix("torch.")

    def as_held(self) -> HeldPart:
        """The description of this entry in a source's offer."""
        form = TensorForm(self.names, self.dtype, self.whole, self.held.tensor.element_size())
        return HeldPart(form, self.held.box)

    def as_want(self, recipe: Recipe | None = None, convert: Convert = Conversion.EXACT) -> Want:
        """The description of this entry in a consumer's request, with the recipe and conversion of its name map."""
        start = None if self.held.box == whole(self.whole) else self.held.box.start
        return Want(self.names, self.dtype, self.held.box.shape, start, recipe, convert)


def named_blocks(weights: Weights) -> list[NamedBlock]:
    """The entries of weights in their order, each tensor once, under all its names.

    Raises:
        ConfigurationError: a value is no dense tensor, or a DTensor whose local part is not one block; or a name cannot
            be encoded in UTF-8.
    """
    by_place: dict[tuple[object, ...], int] = {}
    found: list[NamedBlock] = []
    for name, value in _entries(weights):
        _check_name(name)
        block = _block_of(name, value)
        place = _place_of(block)
        if place is not None and place in by_place:
            known = found[by_place[place]]
            owners = (*known.owners, _local(value))
            found[by_place[place]] = dataclasses.replace(known, names=(*known.names, name), owners=owners)
            continue
        if place is not None:
            by_place[place] = len(found)
        box = Box(block.start, tuple(block.tensor.shape))
        found.append(NamedBlock((name,), Held(block.tensor, box), block.whole, (_local(value),)))
    return found


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name!a} is no name: it cannot be written in UTF-8") from None


def fingerprint(weights: Weights) -> list[tuple[str, int, int]]:
    """A fingerprint that changes if a tensor is replaced or moves in memory."""
    return [(name, id(value), _local(value).data_ptr()) for name, value in _entries(weights)]


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor."""
    return isinstance(value, torch.Tensor) and is_named(value, "DTensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own memory on this rank, else the tensor itself. An operation on it never communicates.

    Raises:
        ConfigurationError: it is a DTensor that keeps its memory elsewhere: torch is another one than those that
            keepstep was tested with. An operation on the DTensor itself would wait for ranks that may be lost.
    """
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return local
    if is_dtensor(tensor):
        raise ConfigurationError(_unknown(tensor, "_local_tensor"))
    return tensor


def _unknown(thing: object, attribute: str) -> str:
    return (
        f"torch {torch.__version__}: a {type(thing).__name__} has no {attribute}, which keepstep reads: install a "
        "release of torch that this release of keepstep was tested with"
    )


def _local(value: torch.Tensor | Block) -> torch.Tensor:
    return value.tensor if isinstance(value, Block) else local_of(value)


def block_of(name: str, tensor: torch.Tensor) -> NamedBlock:
    """This rank's block of one tensor: the whole tensor, or the local part of a DTensor. It shares the memory.

    Raises:
        ConfigurationError: the tensor is a DTensor whose local part is not one block, or it is no plain memory.
    """
    if (problem := other_than_memory(local_of(tensor))) is not None:
        raise ConfigurationError(
            f"{name} is {problem}: keepstep restores tensors whose content is their own memory, and no others"
        )
    if not is_dtensor(tensor):
        shape = tuple(tensor.shape)
        return NamedBlock((name,), Held(tensor.detach(), whole(shape)), shape, (tensor,))
    block = _block_of_dtensor(name, tensor)
    box = Box(block.start, tuple(block.tensor.shape))
    return NamedBlock((name,), Held(block.tensor, box), block.whole, (tensor,))


def _entries(weights: Weights) -> Iterator[tuple[str, torch.Tensor | Block]]:
    if not isinstance(weights, torch.nn.Module):
        yield from weights.items()
        return
    kept = weights.state_dict(keep_vars=True)
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _place_of(block: Block) -> tuple[object, ...] | None:
    """A key for the block's memory, equal for tied tensors. None for a block without elements."""
    tensor = block.tensor
    if not tensor.numel():
        return None
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), block.start, block.whole)


def _block_of(name: str, value: torch.Tensor | Block) -> Block:
    if isinstance(value, Block):
        return dataclasses.replace(value, tensor=_dense(name, value.tensor))
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"'{name}' is a {type(value).__name__}: give tensors, or blocks of tensors")
    if is_dtensor(value):
        return _block_of_dtensor(name, value)
    return Block(_dense(name, value), (0,) * value.dim(), tuple(value.shape))


def _block_of_dtensor(name: str, value: torch.Tensor) -> Block:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(value, DTensor)
    if any(placement.is_partial() for placement in value.placements):
        raise ConfigurationError(f"'{name}' is a partial DTensor, whose values are a sum over ranks: redistribute it")
    local = value._local_tensor  # not to_local(), which is a view of it
    shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape) != tuple(local.shape) or _is_scattered(value):
        raise ConfigurationError(f"'{name}' is a DTensor whose local part {list(local.shape)} is not one block")
    if not local.numel():
        start = (0,) * local.dim()
    return Block(_dense(name, local), tuple(start), tuple(value.shape))


def _is_scattered(value: DTensor) -> bool:
    """Whether this rank's rows are not adjacent: strided sharding that no further sharding makes contiguous.

    Raises:
        ConfigurationError: this torch keeps the stride elsewhere.
    """
    for dim, placement in enumerate(value.placements):
        is_strided = is_named(placement, "_StridedShard")
        if is_strided and not hasattr(placement, "split_factor"):
            raise ConfigurationError(_unknown(placement, "split_factor"))
        factor = placement.split_factor if is_strided else 1  # type: ignore[attr-defined]  # of _StridedShard
        later = [
            value.device_mesh.size(other)
            for other in range(dim + 1, len(value.placements))
            if value.placements[other].is_shard(getattr(placement, "dim", None))
        ]
        if factor != 1 and math.prod(later) != factor:
            return True
    return False


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if (problem := other_than_memory(tensor)) is not None:
        raise ConfigurationError(f"'{name}' is no dense tensor in memory, but {problem}")
    return tensor.detach()


def copies_of(blocks: Sequence[NamedBlock], pinned: bool) -> list[NamedBlock]:
    """Allocates uninitialized, contiguous copies of the entries in host memory; ``pinned`` if a GPU reads them."""
    return [
        dataclasses.replace(block, held=Held(_host_like(block.held.tensor, pinned), block.held.box)) for block in blocks
    ]


def _host_like(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned or tensor.is_cuda)
