"""Between a slot and the tensors: every bit, whatever the strides, against torch's own copy."""

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.transfer.cases import boxes_in

from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.plan import ALIGNMENT_BYTES, Bucket, Limits, Part, Piece, Reader, TensorForm
from keepstep.protocol.transfer.plan import plan_transfer as plan_of
from keepstep.weights.memory import gpu_copies
from keepstep.weights.memory.bytes_of import RELEASED_BYTES, byte_view, copy_bytes
from keepstep.weights.memory.copies import Copy, checksum_in, seal
from keepstep.weights.memory.gpu_copies import GpuCopy
from keepstep.weights.memory.host_copies import BATCH_BYTES, HostCopy
from keepstep.weights.memory.pieces import CHECKSUM_BYTES, Held, as_tensor

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
NUM_READERS = 2


def random_bytes(num_bytes: int, generator: random.Random) -> torch.Tensor:
    return torch.frombuffer(bytearray(generator.randbytes(num_bytes + 1)), dtype=torch.uint8)[:num_bytes]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: random.Random) -> torch.Tensor:
    """Any bits that are values of the dtype, NaNs of all kinds among them."""
    raw = random_bytes(math.prod(shape) * dtype.itemsize, generator)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Every bit of it, in row-major order."""
    return byte_view(tensor.flatten().contiguous()).numpy().tobytes()


# ---- Random transfers -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layered:
    """A tensor of any strides: a part of a larger one, its dimensions in any order.

    Attributes:
        whole: shape of the tensor that it is a block of.
        box: which block it is.
        order: of its dimensions in memory.
        gaps: by dimension, how many elements lie between two of its own.
    """

    dtype: torch.dtype
    whole: tuple[int, ...]
    box: Box
    order: tuple[int, ...]
    gaps: tuple[int, ...]

    def make(self, generator: random.Random) -> Held:
        """Such a tensor, of random bits, and so is what lies between them."""
        shape = self.box.shape
        extents = tuple(shape[dim] * self.gaps[dim] for dim in self.order)
        memory = random_tensor(extents, self.dtype, generator)
        view = memory.permute([self.order.index(dim) for dim in range(len(shape))])
        for dim, gap in enumerate(self.gaps):
            view = view[(slice(None),) * dim + (slice(None, None, gap),)]
        assert tuple(view.shape) == shape
        return Held(view, self.box)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Layered, list[Box]]:
    """A block of a tensor, and what parts of it two readers want."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    box = draw(boxes_in(whole(shape)))
    num_dims = len(shape)
    order = tuple(draw(st.permutations(range(num_dims))))
    gaps = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(num_dims))
    wanted = [draw(boxes_in(box)) for _ in range(NUM_READERS)]
    return Layered(draw(st.sampled_from(DTYPES)), shape, box, order, gaps), wanted


Transfer = tuple[list[tuple[Layered, list[Box]]], int]
transfers = st.tuples(st.lists(tensors(), min_size=1, max_size=3), st.integers(16, 200))
seeds = st.integers(0, 2**32 - 1)


def buckets_of(layers: list[tuple[Layered, list[Box]]], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The plan of a transfer from one source to two readers."""
    forms = [
        TensorForm((f"t{number}",), str(each.dtype).removeprefix("torch."), each.whole, each.dtype.itemsize)
        for number, (each, _wanted) in enumerate(layers)
    ]
    held = [Part(number, each.box) for number, (each, _wanted) in enumerate(layers)]
    readers = [
        Reader(reader, tuple(Part(number, wanted[reader]) for number, (_each, wanted) in enumerate(layers)))
        for reader in range(NUM_READERS)
    ]
    return plan_of(forms, {0: held}, readers, Limits(bucket_bytes, bucket_bytes // 2)).buckets


def slot_of(bucket: Bucket, generator: random.Random) -> torch.Tensor:
    """A slot with something in it from before."""
    return random_bytes(bucket.num_bytes + 64, generator)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to copy. What is for GPUs works in host memory too, except for the streams."""

    copy: Callable[..., Copy]
    checksum: Callable[[torch.Tensor], bytes]

    def copy_of(self, slot: torch.Tensor, bucket: Bucket, held: dict[int, Held]) -> Copy:
        """Of what is here once only, as at a source."""
        return self.copy(slot, bucket, {number: [each] for number, each in held.items()})

    def checksum_of(self, slot: torch.Tensor, bucket: Bucket) -> bytes:
        return self.checksum(slot[: bucket.num_bytes])


HOST = Kind(HostCopy, lambda content: xxhash.xxh3_64_digest(content.numpy().data))
GPU = Kind(GpuCopy, gpu_copies.checksum)
both_kinds = pytest.mark.parametrize("kind", [HOST, GPU], ids=["host", "gpu"])


def expected_in(slot: torch.Tensor, bucket: Bucket, held: dict[int, Held]) -> bytes:
    """What is to be in the slot, by torch's own copy; between the pieces what was there."""
    content = slot.clone()
    for piece in bucket.pieces:
        own = held[piece.tensor].block(piece.box).flatten().contiguous()
        content[piece.offset : piece.offset + piece.num_bytes] = byte_view(own)
    return bits(content)


@both_kinds
@settings(max_examples=150)
@given(transfers, seeds)
def test_gather_puts_every_bit_where_the_plan_says(kind: Kind, transfer: Transfer, seed: int) -> None:
    layers, bucket_bytes = transfer
    generator = random.Random(seed)
    held = {number: each.make(generator) for number, (each, _wanted) in enumerate(layers)}
    for bucket in buckets_of(layers, bucket_bytes):
        slot = slot_of(bucket, generator)
        expected = expected_in(slot, bucket, held)
        before = [bits(each.tensor) for each in held.values()]
        checksum = kind.copy_of(slot, bucket, held).gather()
        assert bits(slot) == expected
        assert checksum == kind.checksum_of(slot, bucket)
        assert [bits(each.tensor) for each in held.values()] == before


@both_kinds
@settings(max_examples=150)
@given(transfers, transfers, seeds)
def test_what_is_scattered_is_what_was_gathered_and_nothing_else_is_touched(
    kind: Kind, transfer: Transfer, other: Transfer, seed: int
) -> None:
    """Into tensors that lie otherwise in memory than those it came from."""
    layers, bucket_bytes = transfer
    generator = random.Random(seed)
    held = {number: each.make(generator) for number, (each, _wanted) in enumerate(layers)}
    taken = {number: like(each, other, number).make(generator) for number, (each, _wanted) in enumerate(layers)}
    expected = {number: each.tensor.clone() for number, each in taken.items()}
    for bucket in buckets_of(layers, bucket_bytes):
        slot = slot_of(bucket, generator)
        checksum = kind.copy_of(slot, bucket, held).gather()
        content = bits(slot)
        assert kind.copy_of(slot, bucket, taken).scatter() == checksum
        assert bits(slot) == content
        for piece in bucket.pieces:
            block = Held(expected[piece.tensor], taken[piece.tensor].box).block(piece.box)
            block.copy_(held[piece.tensor].block(piece.box))
    for number, each in taken.items():
        assert bits(each.tensor) == bits(expected[number])


def like(each: Layered, other: Transfer, number: int) -> Layered:
    """The same block, in memory as another one is where that has as many dimensions."""
    layers, _bucket_bytes = other
    found = layers[number % len(layers)][0]
    if len(found.whole) != len(each.whole):
        return dataclasses.replace(each, order=tuple(range(len(each.whole))), gaps=(1,) * len(each.whole))
    return dataclasses.replace(each, order=found.order, gaps=found.gaps)


@both_kinds
@given(transfers, seeds)
def test_a_copy_can_be_made_again_and_again(kind: Kind, transfer: Transfer, seed: int) -> None:
    """It is prepared once: what the tensors hold later goes along."""
    layers, bucket_bytes = transfer
    generator = random.Random(seed)
    held = {number: each.make(generator) for number, (each, _wanted) in enumerate(layers)}
    for bucket in buckets_of(layers, bucket_bytes)[:2]:
        slot = slot_of(bucket, generator)
        copy = kind.copy_of(slot, bucket, held)
        for _ in range(2):
            for number, (each, _wanted) in enumerate(layers):
                held[number].tensor.copy_(each.make(generator).tensor)
            checksum = copy.gather()
            assert bits(slot) == expected_in(slot, bucket, held)
            assert checksum == kind.checksum_of(slot, bucket)


# ---- Large ones -----------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("elements", [BATCH_BYTES // 4 - 1, BATCH_BYTES, 3 * BATCH_BYTES + 7])
def test_what_takes_several_batches(kind: Kind, dtype: torch.dtype, elements: int, seed: int) -> None:
    """Some small pieces first and last, so that batches begin and end anywhere; every second tensor is transposed."""
    generator = random.Random(seed)
    sizes = [3, elements // dtype.itemsize, 1, BATCH_BYTES // dtype.itemsize + 1, 5]
    held, pieces, offset = {}, [], 0
    for number, size in enumerate(sizes):
        shape = (size, 2)
        is_turned = bool(number % 2)
        tensor = random_tensor(shape[::-1] if is_turned else shape, dtype, generator)
        held[number] = Held(tensor.t() if is_turned else tensor, whole(shape))
        pieces.append(Piece(number, whole(shape), offset, 2 * size * dtype.itemsize))
        offset += -(-pieces[-1].num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    bucket = Bucket(0, 0, pieces[-1].offset + pieces[-1].num_bytes, tuple(pieces), (0,), (0,))
    slot = slot_of(bucket, generator)
    expected = expected_in(slot, bucket, held)
    checksum = kind.copy_of(slot, bucket, held).gather()
    assert bits(slot) == expected
    assert checksum == kind.checksum_of(slot, bucket)
    taken = {number: Held(torch.zeros_like(each.tensor), each.box) for number, each in held.items()}
    assert kind.copy_of(slot, bucket, taken).scatter() == checksum
    assert all(bits(taken[number].tensor) == bits(held[number].tensor) for number in held)


@pytest.mark.parametrize("num_bytes", [0, 1, RELEASED_BYTES - 1, RELEASED_BYTES, RELEASED_BYTES + 1])
def test_bytes_are_copied_between_addresses(num_bytes: int, seed: int) -> None:
    generator = random.Random(seed)
    source, target = random_bytes(num_bytes + 2, generator), random_bytes(num_bytes + 2, generator)
    expected = bits(target[:1]) + bits(source[1:-1]) + bits(target[-1:])
    copy_bytes(target.data_ptr() + 1, source.data_ptr() + 1, num_bytes)
    assert bits(target) == expected


def one_piece(tensor: torch.Tensor) -> tuple[torch.Tensor, Bucket]:
    """A slot and a bucket for all of a tensor."""
    num_bytes = tensor.numel() * tensor.element_size()
    piece = Piece(0, whole(tuple(tensor.shape)), 0, num_bytes)
    return torch.zeros(num_bytes + 64, dtype=torch.uint8), Bucket(0, 0, num_bytes, (piece,), (0,), (0,))


@both_kinds
def test_a_tensor_that_is_spread_out_of_one_element_is_gathered_whole(kind: Kind) -> None:
    tensor = torch.tensor([[2.0], [-0.0]]).expand(2, 3)
    slot, bucket = one_piece(tensor)
    kind.copy_of(slot, bucket, {0: Held(tensor, whole((2, 3)))}).gather()
    assert bits(as_tensor(slot, bucket.pieces[0], torch.float32)) == bits(tensor)


# ---- Checksums ------------------------------------------------------------------------------------------------------


@both_kinds
def test_every_single_bit_of_a_bucket_changes_its_checksum(kind: Kind) -> None:
    tensor = torch.arange(20, dtype=torch.uint8)
    slot, bucket = one_piece(tensor)
    held = {0: Held(tensor, whole((20,)))}
    right = kind.copy_of(slot, bucket, held).gather()
    seen = {right}
    for place in range(bucket.num_bytes):
        for bit in range(8):
            slot[place] ^= 1 << bit
            found = kind.checksum_of(slot, bucket)
            assert found == kind.copy_of(slot, bucket, {0: Held(torch.empty_like(tensor), whole((20,)))}).scatter()
            seen.add(found)
            slot[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * bucket.num_bytes


@both_kinds
def test_the_checksum_lies_behind_the_bucket_and_does_not_touch_it(kind: Kind) -> None:
    tensor = torch.arange(21, dtype=torch.uint8)
    slot, bucket = one_piece(tensor)
    checksum = kind.copy_of(slot, bucket, {0: Held(tensor, whole((21,)))}).gather()
    assert len(checksum) == CHECKSUM_BYTES
    seal(slot, bucket, checksum)
    assert checksum_in(slot, bucket) == checksum == kind.checksum_of(slot, bucket)
    assert bits(slot) == bits(tensor) + checksum + bytes(64 - CHECKSUM_BYTES)


@both_kinds
@given(st.binary(min_size=26, max_size=26), st.binary(min_size=26, max_size=26))
def test_what_lies_between_two_pieces_breaks_no_checksum(kind: Kind, before: bytes, other: bytes) -> None:
    """It is whatever an earlier bucket left there: different in each slot, and it travels along."""
    first, second = Piece(0, whole((3,)), 0, 3), Piece(1, whole((10,)), 16, 10)
    bucket = Bucket(0, 0, 26, (first, second), (0,), (0,))
    held = {
        0: Held(torch.arange(3, dtype=torch.uint8), whole((3,))),
        1: Held(torch.arange(100, 110, dtype=torch.uint8), whole((10,))),
    }
    slots = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in (before, other)]
    for slot in slots:
        taken = {number: Held(torch.zeros_like(each.tensor), each.box) for number, each in held.items()}
        assert kind.copy_of(slot, bucket, held).gather() == kind.copy_of(slot, bucket, taken).scatter()
        assert all(torch.equal(taken[number].tensor, held[number].tensor) for number in held)
    assert bits(slots[0][3:16]) == before[3:16]


def test_a_piece_is_looked_at_in_its_own_shape() -> None:
    slot = torch.arange(64, dtype=torch.uint8)
    piece = Piece(0, Box((4, 1), (2, 3)), 16, 24)
    found = as_tensor(slot, piece, torch.float32)
    assert (found.shape, found.dtype) == ((2, 3), torch.float32)
    assert found.data_ptr() == slot.data_ptr() + 16
    assert bits(found) == bytes(range(16, 40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_found_by_its_place_in_the_whole(dtype: torch.dtype, seed: int) -> None:
    full = random_tensor((6, 7), dtype, random.Random(seed))
    held = Held(full[2:5, 1:6], Box((2, 1), (3, 5)))
    assert bits(held.block(Box((3, 2), (2, 3)))) == bits(full[3:5, 2:5])
    assert held.block(Box((3, 2), (2, 3))).data_ptr() == full[3:, 2:].data_ptr()
