"""What counts as weights, and under which names and places."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.worker.ranks import file_store, run_ranks
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.layout import HeldPart, Want
from keepstep.protocol.transfer.plan import Bucket, Piece, TensorForm
from keepstep.weights.memory import blocks
from keepstep.weights.memory.blocks import Block, NamedBlock, Weights, copies_of, fingerprint, local_of, named_blocks
from keepstep.weights.memory.copies import copy_of
from keepstep.weights.memory.pieces import as_tensor


class Model(torch.nn.Module):
    """A module with tied parameters, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.inner = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("none", None)


def names_of(blocks: list[NamedBlock]) -> list[tuple[str, ...]]:
    return [block.names for block in blocks]


# ---- Modules --------------------------------------------------------------------------------------------------------


def test_a_module_is_its_parameters_and_persistent_buffers_each_once() -> None:
    model = Model()
    blocks = named_blocks(model)
    assert names_of(blocks) == [
        ("scale",),
        ("embedding.weight", "head.weight"),
        ("inner.weight",),
        ("inner.bias",),
    ]
    own = dict([*model.named_parameters(), *model.named_buffers()])
    for block in blocks:
        assert block.held.tensor.data_ptr() == own[block.names[0]].data_ptr()
        assert block.held.box == whole(block.whole)
        assert not block.held.tensor.requires_grad


def test_a_module_with_other_state_is_its_tensors() -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"step": 3}

    assert names_of(named_blocks(Odd(2, 2))) == [("weight",), ("bias",)]


def test_what_is_written_to_a_block_is_in_the_module() -> None:
    model = Model()
    for block in named_blocks(model):
        block.held.tensor.fill_(7)
    assert all((parameter == 7).all() for parameter in model.parameters())


# ---- Mappings and blocks --------------------------------------------------------------------------------------------


def test_a_mapping_is_taken_as_it_stands() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(4)[::2]
    blocks = named_blocks({"b": b, "a": a})
    assert names_of(blocks) == [("b",), ("a",)]
    assert [block.held.tensor.stride() for block in blocks] == [(2,), (3, 1)]
    assert [block.owners[0] is own for block, own in zip(blocks, (b, a), strict=True)] == [True, True]


def test_tied_entries_are_one_with_all_names_and_owners() -> None:
    a = torch.zeros(2, 3)
    again = a.view(2, 3)
    (block,) = named_blocks({"a": a, "b": a, "c": again})
    assert block.names == ("a", "b", "c")
    assert [each is own for each, own in zip(block.owners, (a, a, again), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "other",
    [
        lambda a: a.t(),
        lambda a: a[:2],
        lambda a: a.clone(),
        lambda a: a.view(torch.int32),
        lambda a: Block(a, (0, 0), (6, 3)),
        lambda a: Block(a, (3, 0), (6, 3)),
    ],
    ids=["turned", "a part", "a copy", "another type", "a block", "another block"],
)
def test_what_is_otherwise_there_is_not_tied(other: Callable[[torch.Tensor], torch.Tensor | Block]) -> None:
    a = torch.zeros(3, 3)
    assert names_of(named_blocks({"a": a, "b": other(a)})) == [("a",), ("b",)]


def test_tensors_without_elements_are_never_tied() -> None:
    """They have no place in memory by which they could be told to be."""
    assert names_of(named_blocks({"a": torch.empty(0, 3), "b": torch.empty(0, 3)})) == [("a",), ("b",)]


def test_a_block_says_where_it_lies_in_the_whole() -> None:
    own = torch.zeros(2, 3, dtype=torch.bfloat16)
    (block,) = named_blocks({"a": Block(own, (4, 0), (6, 3))})
    assert block.as_held() == HeldPart(TensorForm(("a",), "bfloat16", (6, 3), 2), Box((4, 0), (2, 3)))
    assert block.as_want() == Want(("a",), "bfloat16", (2, 3), (4, 0))
    assert block.owners[0] is own


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 3), Block(torch.zeros(2, 3), (0, 0), (2, 3))], ids=["tensor", "block"]
)
def test_a_whole_tensor_says_so(value: torch.Tensor | Block) -> None:
    (block,) = named_blocks({"a": value})
    assert block.as_held() == HeldPart(TensorForm(("a",), "float32", (2, 3), 4), whole((2, 3)))
    assert block.as_want() == Want(("a",), "float32", (2, 3), None)


def test_a_place_may_be_given_as_a_list() -> None:
    """As it may where the block is made."""
    (block,) = named_blocks({"a": Block(torch.zeros(2, 3), [4, 0], [6, 3])})  # type: ignore[arg-type]  # for the test
    assert block.as_held() == HeldPart(TensorForm(("a",), "float32", (6, 3), 4), Box((4, 0), (2, 3)))


@pytest.mark.parametrize(
    ("start", "shape"),
    [
        ((5, 0), (6, 3)),
        ((-1, 0), (6, 3)),
        ((0, 0), (6, 2)),
        ((0,), (6, 3)),
        ((0, 0), (6, 3, 1)),
        ((0, 0, 0), (6, 3, 1)),
    ],
)
def test_a_block_that_does_not_lie_in_the_whole_is_refused(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"a block of shape \[2, 3\] from .* does not lie in a tensor"):
        Block(torch.zeros(2, 3), start, shape)


def test_a_dtype_is_called_as_torch_calls_it() -> None:
    dtypes = [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.float16]
    blocks = named_blocks({str(dtype): torch.zeros(1, dtype=dtype) for dtype in dtypes})
    assert [block.dtype for block in blocks] == ["float8_e4m3fn", "bool", "complex64", "float16"]
    assert [getattr(torch, block.dtype) for block in blocks] == dtypes


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nn.Parameter(torch.zeros(2, device="meta")),
    ],
    ids=["sparse", "meta", "meta parameter"],
)
@pytest.mark.parametrize("in_block", [False, True], ids=["tensor", "block"])
def test_what_is_no_dense_tensor_in_memory_is_refused(tensor: torch.Tensor, in_block: bool) -> None:
    shape = tuple(tensor.shape)
    value = Block(tensor, (0,) * len(shape), shape) if in_block else tensor
    with pytest.raises(ConfigurationError, match="'odd' is no dense tensor in memory"):
        named_blocks({"fine": torch.zeros(1), "odd": value})


@pytest.mark.parametrize("value", [3, None, [torch.zeros(1)], "text"])
def test_what_is_no_tensor_at_all_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="'odd'"):
        named_blocks({"fine": torch.zeros(1), "odd": value})


def gathered(block: NamedBlock) -> torch.Tensor:
    """What a consumer would get of a block."""
    tensor = block.held.tensor
    piece = Piece(0, block.held.box, 0, tensor.numel() * tensor.element_size())
    slot = torch.zeros(piece.num_bytes, dtype=torch.uint8)
    copy_of(slot, Bucket(0, 0, piece.num_bytes, (piece,), (0,), (0,)), {0: [block.held]}).gather()
    return as_tensor(slot, piece, tensor.dtype)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch._neg_view(torch.ones(3))],
    ids=["conjugate", "negative"],
)
def test_a_lazy_view_is_refused_or_taken_for_its_values(tensor: torch.Tensor) -> None:
    """Its memory holds other values than it has."""
    try:
        (block,) = named_blocks({"a": tensor})
    except ConfigurationError:
        return
    assert torch.equal(gathered(block), tensor)


# ---- DTensors -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_dtensor_of_one_process_is_all_of_it(mesh: DeviceMesh, placement: Placement) -> None:
    full = torch.arange(6.0).reshape(2, 3)
    tensor = torch.nn.Parameter(distribute_tensor(full, mesh, [placement]))
    (block,) = named_blocks({"a": tensor})
    assert block.as_held() == HeldPart(TensorForm(("a",), "float32", (2, 3), 4), whole((2, 3)))
    local = tensor.data.to_local()
    assert block.held.tensor.data_ptr() == block.owners[0].data_ptr() == local.data_ptr()
    assert not block.held.tensor.requires_grad
    block.held.tensor.fill_(7)
    assert (local == 7).all()


def test_the_owner_of_a_dtensor_is_what_it_looks_at(mesh: DeviceMesh) -> None:
    """New memory that is given to the owner is the DTensor's from then on."""
    tensor = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)]))
    (block,) = named_blocks({"a": tensor})
    block.owners[0].data = torch.ones(2, 3)
    assert (tensor.data.to_local() == 1).all()


def test_tied_dtensors_are_one(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)])
    assert names_of(named_blocks({"a": tensor, "b": tensor})) == [("a", "b")]


def test_a_partial_dtensor_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Partial()])
    with pytest.raises(ConfigurationError, match="'a' is a partial DTensor, whose values are a sum over ranks"):
        named_blocks({"a": tensor})


def test_a_local_part_that_is_not_one_block_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(
        torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 3]), stride=(3, 1)
    )
    with pytest.raises(ConfigurationError, match=r"'a' is a DTensor whose local part \[2, 3\] is not one block"):
        named_blocks({"a": tensor})


Placed = tuple[tuple[int, ...], tuple[int, ...], list[float]]
"""First index and shape of a block, and what is in it."""

PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((3,), [Shard(0)]),
    "columns": ((3,), [Shard(1)]),
    "replicas": ((3,), [Replicate()]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
    "rows of replicas": ((2, 2), [Replicate(), Shard(0)]),
    "rows cut by TP, then by FSDP": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "scattered rows": ((2, 2), [_StridedShard(0, split_factor=2), Replicate()]),
}
"""By what they are called: the shape of a mesh, and how a tensor lies on it."""
SHAPES = {"even": (12, 12), "uneven": (7, 5), "few": (4, 4), "fewer than ranks": (2, 1)}


def full_of(shape_name: str) -> torch.Tensor:
    shape = torch.Size(SHAPES[shape_name])
    return torch.arange(float(shape.numel())).reshape(shape)


def cases_of(mesh_shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """All placements on such a mesh, with all shapes that torch can cut so."""
    return [
        (how, shape_name)
        for how, (its_mesh, placements) in PLACEMENTS.items()
        for shape_name in SHAPES
        if its_mesh == mesh_shape and (shape_name == "even" or not isinstance(placements[0], _StridedShard))
    ]


def placed_blocks(rank: int, size: int, path: Path, mesh_shape: tuple[int, ...]) -> list[Placed | str]:
    """Where this rank's part of each tensor is said to be, and what it holds."""
    dist.init_process_group("gloo", store=file_store(path), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", mesh_shape)
    found: list[Placed | str] = []
    for how, shape_name in cases_of(mesh_shape):
        tensor = distribute_tensor(full_of(shape_name), mesh, PLACEMENTS[how][1])
        try:
            (block,) = named_blocks({"a": tensor})
            found.append((block.held.box.start, block.held.box.shape, block.held.tensor.flatten().tolist()))
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=["connection", "grid"])
def test_the_part_of_a_dtensor_is_said_to_be_where_it_is(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    """Together they are all of it. A part that is not one block may be refused."""
    answers = run_ranks(torch.Size(mesh_shape).numel(), placed_blocks, tmp_path, mesh_shape)
    for (how, shape_name), *parts in zip(cases_of(mesh_shape), *answers, strict=True):
        full, seen = full_of(shape_name), set[float]()
        for part in parts:
            if isinstance(part, str):
                assert how == "scattered rows", part
                continue
            start, shape, values = part
            box = Box(start, shape)
            assert whole(tuple(full.shape)).holds(box)
            assert values == full[tuple(map(slice, box.start, box.stop))].flatten().tolist(), (how, shape_name, box)
            seen |= set(values)
        assert how == "scattered rows" or seen == set(full.flatten().tolist())


# ---- Another release of torch --------------------------------------------------------------------------------------


class OtherTensor(torch.Tensor):
    """A DTensor that keeps its memory under another name."""


OtherTensor.__name__ = "DTensor"


class OtherPlacement:
    """A placement that keeps its stride under another name."""

    dim = 0

    def is_shard(self, dim: int | None) -> bool:
        return dim == self.dim


OtherPlacement.__name__ = "_StridedShard"


def test_a_dtensor_of_another_torch_is_not_taken_for_a_tensor_of_this_rank() -> None:
    """Each operation on it would wait for all ranks, also for one that is lost."""
    tensor = torch.ones(2).as_subclass(OtherTensor)
    what = rf"^torch {re.escape(torch.__version__)}: a DTensor has no _local_tensor"
    with pytest.raises(ConfigurationError, match=what):
        local_of(tensor)


def test_a_stride_under_another_name_is_not_taken_for_none() -> None:
    value = SimpleNamespace(placements=[OtherPlacement()], device_mesh=None)
    what = rf"^torch {re.escape(torch.__version__)}: a _StridedShard has no split_factor"
    with pytest.raises(ConfigurationError, match=what):
        blocks._is_scattered(value)  # type: ignore[arg-type]  # stands for a DTensor


# ---- What changes ---------------------------------------------------------------------------------------------------


def test_a_fingerprint_stays_while_values_change() -> None:
    model = Model()
    before = fingerprint(model)
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert fingerprint(model) == before


def replace_parameter(model: Model) -> None:
    model.inner.bias = torch.nn.Parameter(torch.zeros(3))


def replace_parameter_in_its_place(model: Model) -> None:
    model.inner.bias = torch.nn.Parameter(model.inner.bias.data)


def move_parameter(model: Model) -> None:
    model.inner.bias.data = torch.zeros(3)


def untie(model: Model) -> None:
    model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())


def add(model: Model) -> None:
    model.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    "change",
    [replace_parameter, replace_parameter_in_its_place, move_parameter, untie, add],
    ids=lambda each: each.__name__,
)
def test_a_fingerprint_tells_what_was_replaced_or_moved(change: Callable[[Model], None]) -> None:
    model = Model()
    kept = list(model.parameters())  # so that no memory is used again
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before
    assert kept


@pytest.mark.parametrize(
    "weights",
    [
        {"a": torch.zeros(6, 4).t(), "b": Block(torch.zeros(9)[::3], (2,), (7,)), "empty": torch.zeros(0, 2)},
        Model(),
    ],
    ids=["mapping", "module"],
)
def test_copies_have_memory_of_their_own(weights: Weights) -> None:
    blocks = named_blocks(weights)
    copies = copies_of(blocks, pinned=False)
    assert [copy.as_held() for copy in copies] == [block.as_held() for block in blocks]
    for copy, block in zip(copies, blocks, strict=True):
        assert copy.held.tensor.is_contiguous()
        assert not copy.held.tensor.numel() or copy.held.tensor.data_ptr() != block.held.tensor.data_ptr()
