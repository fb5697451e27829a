"""The plan of a transfer, against an oracle that moves single elements."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.transfer.cases import Case, Element, cases, indices, replicated, slab

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer.boxes import Box, cells, whole
from keepstep.protocol.transfer.plan import (
    ALIGNMENT_BYTES,
    Bucket,
    Limits,
    Part,
    Piece,
    Plan,
    Reader,
    TensorForm,
    plan_transfer,
)

moderately = settings(max_examples=70)  # a random transfer takes ten milliseconds to make


def elements(bucket: Bucket) -> list[Element]:
    """All that lies in a bucket, in its order there."""
    return [(piece.tensor, index) for piece in bucket.pieces for index in indices(piece.box)]


def aligned(num_bytes: int) -> int:
    """The first place for a block behind so many bytes."""
    return next(place for place in range(num_bytes, num_bytes + ALIGNMENT_BYTES) if place % ALIGNMENT_BYTES == 0)


def by_group(case: Case) -> dict[tuple[frozenset[int], tuple[int, ...]], list[Bucket]]:
    """The buckets of a plan in their order, by holders and readers; fails if those differ inside a bucket."""
    groups: dict[tuple[frozenset[int], tuple[int, ...]], list[Bucket]] = {}
    for bucket in case.plan.buckets:
        (holding,) = {frozenset(case.held[element]) for element in elements(bucket)}
        groups.setdefault((holding, bucket.readers), []).append(bucket)
    return groups


def is_large(bucket: Bucket, limits: Limits) -> bool:
    """Whether a block in it is so large that it has to be alone."""
    return any(piece.num_bytes >= limits.lone_bytes for piece in bucket.pieces)


def loads(case: Case) -> dict[int, int]:
    """How many bytes each source sends."""
    return {holder: sum(bucket.num_bytes for bucket in case.plan.sent_by(holder)) for holder in case.holders}


# ---- What moves -----------------------------------------------------------------------------------------------------


@moderately
@given(cases())
def test_each_wanted_element_moves_once_to_exactly_those_who_want_it(case: Case) -> None:
    moved = [(element, bucket.readers) for bucket in case.plan.buckets for element in elements(bucket)]
    assert sorted(moved) == sorted((element, tuple(sorted(readers))) for element, readers in case.wanted.items())


@moderately
@given(cases())
def test_a_source_holds_what_it_sends(case: Case) -> None:
    for bucket in case.plan.buckets:
        assert all(bucket.source in case.held[element] for element in elements(bucket))


@moderately
@given(cases())
def test_the_devices_of_a_bucket_are_those_of_its_readers(case: Case) -> None:
    for bucket in case.plan.buckets:
        where = {case.readers[reader].device for reader in bucket.readers}
        assert bucket.devices == tuple(sorted(where))


@moderately
@given(cases())
def test_each_device_gets_each_element_that_it_wants_once(case: Case) -> None:
    for device in {reader.device for reader in case.readers}:
        wanting = {index for index, reader in enumerate(case.readers) if reader.device == device}
        wanted = [element for element, readers in case.wanted.items() if readers & wanting]
        came = [element for bucket in case.plan.sent_to(device) for element in elements(bucket)]
        assert sorted(came) == sorted(wanted)


@moderately
@given(cases(), st.data())
def test_what_is_wanted_and_held_by_no_source_is_refused_and_nothing_else(case: Case, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(sorted(case.holders)))
    case = dataclasses.replace(
        case, holders={holder: case.holders[holder] for holder in case.holders if holder != lost}
    )
    missing = sorted(case.wanted.keys() - case.held.keys())
    if not missing:
        assert sum(len(elements(bucket)) for bucket in case.plan.buckets) == len(case.wanted)
        return
    with pytest.raises(ConfigurationError) as refusal:
        _ = case.plan
    first, _index = missing[0]
    starts = [list(index) for tensor, index in missing if tensor == first]
    named = [start for start in starts if f"'{case.tensors[first].name}' at {start} with" in str(refusal.value)]
    assert len(named) == 1, f"{refusal.value} does not name the tensor and where it is missing"


# ---- How it is packed -----------------------------------------------------------------------------------------------


@moderately
@given(cases())
def test_buckets_are_numbered_in_the_order_in_which_they_move(case: Case) -> None:
    assert [bucket.index for bucket in case.plan.buckets] == list(range(len(case.plan.buckets)))


@moderately
@given(cases())
def test_blocks_lie_in_their_bucket_in_order_aligned_and_without_waste(case: Case) -> None:
    for bucket in case.plan.buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == aligned(end)
            assert piece.num_bytes == len(indices(piece.box)) * case.tensors[piece.tensor].item_bytes
            end = piece.offset + piece.num_bytes
        assert 0 < end == bucket.num_bytes <= case.limits.bucket_bytes


@moderately
@given(cases())
def test_large_blocks_are_alone(case: Case) -> None:
    for bucket in case.plan.buckets:
        assert len(bucket.pieces) == 1 or not is_large(bucket, case.limits)


@moderately
@given(cases())
def test_in_a_group_of_holders_and_readers_tensors_move_in_order(case: Case) -> None:
    """The large blocks and the others each among themselves: a large one does not wait until a bucket is full."""
    for buckets in by_group(case).values():
        for large in (True, False):
            kind = [bucket for bucket in buckets if is_large(bucket, case.limits) == large]
            order = [piece.tensor for bucket in kind for piece in bucket.pieces]
            assert order == sorted(order)


@moderately
@given(cases())
def test_in_a_group_a_bucket_is_closed_only_when_the_next_block_does_not_fit(case: Case) -> None:
    for buckets in by_group(case).values():
        shared = [bucket for bucket in buckets if not is_large(bucket, case.limits)]
        for bucket, following in itertools.pairwise(shared):
            assert aligned(bucket.num_bytes) + following.pieces[0].num_bytes > case.limits.bucket_bytes


@moderately
@given(cases())
def test_a_block_is_cut_only_at_an_edge_of_a_box_or_where_a_bucket_is_full(case: Case) -> None:
    for tensor, form in enumerate(case.tensors):
        pieces = [piece for bucket in case.plan.buckets for piece in bucket.pieces if piece.tensor == tensor]
        owned = [*case.holders.values(), *(reader.parts for reader in case.readers)]
        grid = cells([part.box for parts in owned for part in parts if part.tensor == tensor])
        wanted = [cell for cell in grid if (tensor, cell.start) in case.wanted]
        blocks = [block for cell in wanted for block in cell.cut(case.limits.bucket_bytes // form.item_bytes)]
        assert sorted((piece.box.start, piece.box.shape) for piece in pieces) == sorted(
            (block.start, block.shape) for block in blocks
        )


# ---- Who sends ------------------------------------------------------------------------------------------------------


@moderately
@given(cases())
def test_a_bucket_comes_from_the_holder_with_the_fewest_bytes_so_far(case: Case) -> None:
    so_far = dict.fromkeys(case.holders, 0)
    for bucket in case.plan.buckets:
        holding = case.held[elements(bucket)[0]]
        assert so_far[bucket.source] == min(so_far[holder] for holder in holding)
        so_far[bucket.source] += bucket.num_bytes
    assert so_far == loads(case)


@moderately
@given(cases().map(replicated))
def test_of_replicas_none_sends_more_than_a_bucket_more_than_another(case: Case) -> None:
    assert sum(loads(case).values()) == sum(bucket.num_bytes for bucket in case.plan.buckets)
    largest = max((bucket.num_bytes for bucket in case.plan.buckets), default=0)
    assert max(loads(case).values()) - min(loads(case).values()) <= largest <= case.limits.bucket_bytes


@moderately
@given(cases())
def test_the_same_layout_gives_the_same_plan_in_whatever_order_its_parts_are_listed(case: Case) -> None:
    """Each device makes the plan itself."""
    holders = {holder: parts[::-1] for holder, parts in reversed(case.holders.items())}
    readers = [Reader(reader.device, reader.parts[::-1]) for reader in case.readers]
    again = plan_transfer(tuple(case.tensors), holders, tuple(readers), case.limits)
    assert again == case.plan
    assert hash(again) == hash(case.plan)


@moderately
@given(cases())
def test_the_parts_of_a_plan_are_what_one_source_sends_and_one_device_gets(case: Case) -> None:
    plan = case.plan
    for source in [*case.holders, -1]:
        assert plan.sent_by(source) == tuple(bucket for bucket in plan.buckets if bucket.source == source)
    for device in range(6):
        going = {index for index, reader in enumerate(case.readers) if reader.device == device}
        assert plan.sent_to(device) == tuple(bucket for bucket in plan.buckets if going & set(bucket.readers))


# ---- By hand --------------------------------------------------------------------------------------------------------

ROOMY = Limits(bucket_bytes=1024, lone_bytes=1024)
WEIGHT = TensorForm(("weight",), "float32", (4, 8), 4)
BIAS = TensorForm(("bias",), "float32", (8,), 4)


def columns(first: int, stop: int) -> Part:
    """Some columns of the weight, as the first tensor."""
    return Part(0, slab(WEIGHT.shape, 1, first, stop))


def test_tensor_parallel_from_two_to_one() -> None:
    holders = {3: [columns(0, 4)], 7: [columns(4, 8)]}
    plan = plan_transfer([WEIGHT], holders, [Reader(9, (columns(0, 8),))], ROOMY)
    assert plan.buckets == (
        Bucket(0, 3, 64, (Piece(0, Box((0, 0), (4, 4)), 0, 64),), (0,), (9,)),
        Bucket(1, 7, 64, (Piece(0, Box((0, 4), (4, 4)), 0, 64),), (0,), (9,)),
    )


def test_tensor_parallel_from_one_to_two() -> None:
    """The bias, that both have whole, moves once for both."""
    holders = {0: [columns(0, 8), Part(1, whole((8,)))]}
    readers = [Reader(6 - half, (columns(4 * half, 4 * half + 4), Part(1, whole((8,))))) for half in (0, 1)]
    plan = plan_transfer([WEIGHT, BIAS], holders, readers, ROOMY)
    assert plan.buckets == (
        Bucket(0, 0, 64, (Piece(0, Box((0, 0), (4, 4)), 0, 64),), (0,), (6,)),
        Bucket(1, 0, 64, (Piece(0, Box((0, 4), (4, 4)), 0, 64),), (1,), (5,)),
        Bucket(2, 0, 32, (Piece(1, Box((0,), (8,)), 0, 32),), (0, 1), (5, 6)),
    )


def test_tensor_parallel_from_four_to_two() -> None:
    holders = {rank: [columns(2 * rank, 2 * rank + 2)] for rank in range(4)}
    readers = [Reader(10, (columns(0, 4),)), Reader(11, (columns(4, 8),))]
    plan = plan_transfer([WEIGHT], holders, readers, ROOMY)
    assert plan.buckets == (
        Bucket(0, 0, 32, (Piece(0, Box((0, 0), (4, 2)), 0, 32),), (0,), (10,)),
        Bucket(1, 1, 32, (Piece(0, Box((0, 2), (4, 2)), 0, 32),), (0,), (10,)),
        Bucket(2, 2, 32, (Piece(0, Box((0, 4), (4, 2)), 0, 32),), (1,), (11,)),
        Bucket(3, 3, 32, (Piece(0, Box((0, 6), (4, 2)), 0, 32),), (1,), (11,)),
    )


def test_fsdp_from_three_to_whole_replicas() -> None:
    """Uneven shards, an empty one, and two of three readers on one device."""
    tensors = [TensorForm(("rows",), "bfloat16", (7, 3), 2), TensorForm(("few",), "uint8", (2,), 1)]
    edges = {0: ((0, 3), (0, 1)), 1: ((3, 6), (1, 2)), 2: ((6, 7), (2, 2))}
    holders = {
        rank: [Part(0, slab((7, 3), 0, *rows)), Part(1, slab((2,), 0, *few))] for rank, (rows, few) in edges.items()
    }
    readers = [Reader(device, (Part(0, whole((7, 3))), Part(1, whole((2,))))) for device in (5, 4, 5)]
    plan = plan_transfer(tensors, holders, readers, ROOMY)
    assert plan.buckets == (
        Bucket(0, 0, 33, (Piece(0, Box((0, 0), (3, 3)), 0, 18), Piece(1, Box((0,), (1,)), 32, 1)), (0, 1, 2), (4, 5)),
        Bucket(1, 1, 33, (Piece(0, Box((3, 0), (3, 3)), 0, 18), Piece(1, Box((1,), (1,)), 32, 1)), (0, 1, 2), (4, 5)),
        Bucket(2, 2, 6, (Piece(0, Box((6, 0), (1, 3)), 0, 6),), (0, 1, 2), (4, 5)),
    )


def test_replicas_share_the_work_and_large_blocks_do_not_wait_for_small_ones() -> None:
    tensors = [
        TensorForm(("scale",), "int64", (), 8),
        TensorForm(("empty",), "float32", (0, 4), 4),
        TensorForm(("large",), "uint8", (5, 10), 1),
        TensorForm(("small",), "uint8", (3,), 1),
    ]
    everything = [Part(index, whole(form.shape)) for index, form in enumerate(tensors)]
    limits = Limits(bucket_bytes=32, lone_bytes=20)
    plan = plan_transfer(tensors, {7: everything, 5: everything}, [Reader(1, tuple(everything))], limits)
    assert plan.buckets == (
        Bucket(0, 5, 30, (Piece(2, Box((0, 0), (3, 10)), 0, 30),), (0,), (1,)),
        Bucket(1, 7, 20, (Piece(2, Box((3, 0), (2, 10)), 0, 20),), (0,), (1,)),
        Bucket(2, 7, 19, (Piece(0, Box((), ()), 0, 8), Piece(3, Box((0,), (3,)), 16, 3)), (0,), (1,)),
    )


def test_nothing_wanted_is_an_empty_plan() -> None:
    nothing = Reader(0, (Part(0, Box((2, 0), (0, 8))),))
    for readers in ([], [Reader(0, ())], [nothing]):
        assert plan_transfer([WEIGHT], {}, readers, ROOMY) == Plan(())
        assert plan_transfer([WEIGHT], {0: [columns(0, 8)]}, readers, ROOMY) == Plan(())
    assert plan_transfer([], {0: []}, [Reader(0, ())], ROOMY) == Plan(())


def test_a_refusal_says_what_is_missing() -> None:
    holders = {0: [columns(0, 3), Part(1, whole((8,)))], 1: [columns(5, 8)]}
    readers = [Reader(0, (Part(1, whole((8,))),)), Reader(1, (columns(2, 6),))]
    with pytest.raises(ConfigurationError, match=r"no source holds 'weight' at \[0, 3\] with shape \[4, 2\]"):
        plan_transfer([WEIGHT, BIAS], holders, readers, ROOMY)


@pytest.mark.parametrize("bucket_bytes", [15, 0, -1])
def test_a_bucket_too_small_for_one_element_is_refused(bucket_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"bucket_bytes={bucket_bytes}:.* at least 16 bytes"):
        Limits(bucket_bytes, lone_bytes=1)


def test_the_smallest_bucket_takes_one_element_of_the_largest_dtype() -> None:
    form = TensorForm(("phases",), "complex128", (3,), 16)
    part = Part(0, whole((3,)))
    plan = plan_transfer([form], {0: [part]}, [Reader(0, (part,))], Limits(bucket_bytes=16, lone_bytes=100))
    assert [bucket.pieces for bucket in plan.buckets] == [(Piece(0, Box((at,), (1,)), 0, 16),) for at in range(3)]
