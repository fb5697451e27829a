"""Tensors as runs of bytes."""

import random
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch

from keepstep.errors import ConfigurationError
from keepstep.weights.memory.bytes_of import byte_view, digest_of, host_bytes, is_dense, other_than_memory

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
DENSE = {
    "vector": torch.arange(5.0),
    "contiguous": torch.arange(24.0).reshape(2, 3, 4),
    "channels_last": torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "0-dim": torch.tensor(3.5),
    "one element": torch.ones(1, 1, 1),
    "empty": torch.empty(0),
    "empty in the middle": torch.empty(2, 0, 3),
    "empty at the end": torch.empty(2, 3, 0),
    "with a dimension of one": torch.arange(6.0).reshape(2, 1, 3).transpose(0, 1),
    "rows of a larger one": torch.arange(20.0).reshape(5, 4)[1:3],
    "expanded by one": torch.arange(3.0).expand(1, 3),
}
NOT_DENSE = {
    "every second": torch.arange(6.0)[::2],
    "a column": torch.arange(6.0).reshape(2, 3)[:, 1],
    "columns": torch.arange(6.0).reshape(2, 3)[:, :2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "overlapping": torch.arange(4.0).as_strided((2, 2), (1, 1)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_fills_one_run_of_memory(name: str) -> None:
    tensor = DENSE[name].clone(memory_format=torch.preserve_format)
    assert is_dense(DENSE[name])
    view = byte_view(tensor)
    assert (view.dtype, view.dim(), view.numel()) == (torch.uint8, 1, tensor.numel() * tensor.element_size())
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", DENSE)
def test_bytes_written_through_the_view_are_the_tensors(name: str) -> None:
    source, target = DENSE[name], torch.empty_like(DENSE[name]).fill_(-1)
    assert source.stride() == target.stride()
    byte_view(target).copy_(byte_view(source))
    assert torch.equal(source, target)


def test_a_part_of_a_larger_tensor_leaves_the_rest_alone() -> None:
    whole = torch.zeros(5, 4)
    byte_view(whole[1:3]).fill_(255)
    assert whole[0].sum() == whole[3:].sum() == 0
    assert whole[1:3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(dtype: torch.dtype) -> None:
    source = torch.arange(1, 7).reshape(2, 3).to(dtype)
    target = torch.zeros(2, 3, dtype=dtype)
    byte_view(target).copy_(byte_view(source))
    assert torch.equal(byte_view(source), byte_view(target))
    assert str(source.tolist()) == str(target.tolist())


@pytest.mark.parametrize("name", NOT_DENSE)
def test_what_does_not_fill_one_run_is_refused(name: str) -> None:
    tensor = NOT_DENSE[name]
    assert not is_dense(tensor)
    with pytest.raises(ConfigurationError, match=r"shape \(.*strides \(.*does not fill one run of memory"):
        byte_view(tensor)


def test_a_parameter_can_be_written_without_autograd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    byte_view(parameter).copy_(byte_view(torch.arange(3.0)))
    assert torch.equal(parameter.detach(), torch.arange(3.0))


# ---- the digest -----------------------------------------------------------------------------------------------------


def test_every_single_bit_changes_the_digest() -> None:
    named = [
        ("a", torch.arange(3.0)),
        ("b", torch.ones(2, 2, dtype=torch.bfloat16)),
        ("c", torch.tensor(1, dtype=torch.int64)),
        ("d", torch.empty(0)),
        ("e", torch.arange(16.0).reshape(1, 2, 4, 2).to(memory_format=torch.channels_last)),
    ]
    host = b"host state"
    seen = {digest_of(named, host)}
    flips = 0
    for _name, tensor in named:
        content = byte_view(tensor)
        for index in range(content.numel()):
            for bit in range(8):
                content[index] ^= 1 << bit
                seen.add(digest_of(named, host))
                content[index] ^= 1 << bit
                flips += 1
    for index in range(len(host)):
        for bit in range(8):
            changed = bytearray(host)
            changed[index] ^= 1 << bit
            seen.add(digest_of(named, bytes(changed)))
            flips += 1
    assert flips == 8 * (12 + 8 + 8 + 64 + len(host))
    assert len(seen) == flips + 1, "two states that differ in one bit have the same digest"
    assert digest_of(named, host) in seen


def test_bits_that_compare_equal_are_distinguished() -> None:
    assert digest_of([("a", torch.tensor([0.0]))], b"") != digest_of([("a", torch.tensor([-0.0]))], b"")
    nan = torch.tensor([float("nan")])
    assert digest_of([("a", nan)], b"") == digest_of([("a", nan.clone())], b"")


def test_name_type_shape_and_order_belong_to_the_digest() -> None:
    zeros = torch.zeros(2, 3)
    digests = [
        digest_of(named, b"")
        for named in (
            [("a", zeros)],
            [("b", zeros)],
            [("a", zeros.reshape(3, 2))],
            [("a", zeros.reshape(6))],
            [("a", zeros.to(torch.int32))],
            [("a", torch.zeros(2, 3, 1))],
            [],
            [("a", torch.zeros(0)), ("b", zeros)],
            [("b", zeros), ("a", torch.zeros(0))],
        )
    ]
    assert len(set(digests)) == len(digests)


def test_a_larger_random_state(seed: int) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    named = [(str(index), torch.randn(generator.randrange(0, 300))) for index in range(8)]
    before = digest_of(named, b"x")
    index = generator.randrange(8)
    while not named[index][1].numel():
        index = (index + 1) % 8
    content = byte_view(named[index][1])
    content[generator.randrange(content.numel())] ^= 1 << generator.randrange(8)
    assert digest_of(named, b"x") != before


def test_other_values_in_another_order_of_memory_are_distinguished() -> None:
    rows = torch.arange(4.0).reshape(2, 2)
    columns = rows.t()
    assert not torch.equal(rows, columns)
    assert digest_of([("a", rows)], b"") != digest_of([("a", columns)], b"")


# ---- what is no plain memory -----------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """A tensor whose values lie in another one, as those of torchao's and bitsandbytes' do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(arguments[0].inner)


class Labelled(torch.Tensor):
    """A plain tensor with another type."""


def inside(transform: Callable[..., Any]) -> torch.Tensor:
    """A tensor as a function sees it that is transformed."""
    seen = []
    transform(lambda x: (seen.append(x), (x * x).sum())[1])(torch.ones(2, 2))
    return seen[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scaled(torch.ones(2)), "Scaled, whose content lies in other tensors"),
        (lambda: torch.nn.Parameter(Scaled(torch.ones(2)), requires_grad=False), "Scaled, whose content lies"),
        (lambda: torch.nn.LazyLinear(2).weight, "UninitializedParameter: its module has not seen an input yet"),
        (lambda: inside(torch.func.vmap), "torch.Tensor inside of a transformation of torch.func"),
        (lambda: inside(torch.func.grad), "torch.Tensor inside of a transformation of torch.func"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized torch.Tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested torch.Tensor"),
        (lambda: torch.ones(2, device="meta"), "torch.Tensor on meta, which is neither the CPU nor a CUDA GPU"),
        (lambda: NOT_DENSE["sparse"], "a sparse_coo torch.Tensor, whose content lies in several tensors"),
        (freed, "a torch.Tensor whose storage has been freed"),
    ],
    ids=["wrapper", "parameter", "lazy", "vmap", "grad", "quantized", "nested", "meta", "sparse", "freed"],
)
@pytest.mark.filterwarnings("ignore")  # torch's own: prototypes, and what it will remove
def test_what_is_no_plain_memory_is_named(make: Callable[[], torch.Tensor], text: str) -> None:
    assert text in str(other_than_memory(make()))


@pytest.mark.parametrize("name", [name for name in [*DENSE, *NOT_DENSE] if name != "sparse"])
def test_plain_tensors_of_any_type_are_memory(name: str) -> None:
    tensor = (DENSE | NOT_DENSE)[name]
    assert other_than_memory(tensor) is None
    assert other_than_memory(torch.nn.Parameter(tensor)) is None
    assert other_than_memory(tensor.as_subclass(Labelled)) is None


def test_reading_the_bytes_of_a_tensor_leaves_it_as_it_is() -> None:
    """``numpy()`` would not: torch does not resize a tensor after it, as observers do with their buffers."""
    tensor = torch.arange(3.0)
    assert bytes(host_bytes(tensor)) == bytes(tensor.clone().numpy().data)
    tensor.resize_(100)
    assert host_bytes(torch.zeros(0)).nbytes == 0
