"""The plan of a transfer, against a brute force that moves single bytes."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.errors import ConfigurationError
from keepstep.protocol.transfer import DEFAULT_BUCKET_BYTES, LONE_SHARE, Bucket, Piece, plan_buckets

Byte = tuple[int, int]
"""Tensor and offset in it."""

sizes = st.lists(st.integers(0, 60), max_size=12)
source_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True)
bucket_sizes = st.integers(1, 70)


def bytes_in_order(tensor_bytes: list[int]) -> list[Byte]:
    """Every byte of every tensor."""
    return [(tensor, offset) for tensor, size in enumerate(tensor_bytes) for offset in range(size)]


def bytes_sent(bucket: Bucket) -> list[Byte]:
    """What lies in a bucket, byte for byte by its offset there; fails on a hole or an overlap."""
    placed: dict[int, Byte] = {}
    for piece in bucket.pieces:
        for index in range(piece.num_bytes):
            at = piece.bucket_offset + index
            assert at not in placed, f"byte {at} of bucket {bucket.index} is written twice"
            placed[at] = (piece.tensor, piece.tensor_offset + index)
    assert sorted(placed) == list(range(bucket.num_bytes)), f"bucket {bucket.index} has holes or a wrong size"
    return [placed[at] for at in sorted(placed)]


@given(sizes, source_lists, bucket_sizes)
@example([], [3], 8)
@example([0, 0], [3, 1], 8)
@example([8, 8], [3, 1], 8)
@example([1] * 9, [3, 1], 40)
@example([60], [3, 1, 2], 1)
def test_every_byte_is_sent_exactly_once(tensor_bytes: list[int], sources: list[int], size: int) -> None:
    plan = plan_buckets(tensor_bytes, sources, size)
    assert sorted(byte for bucket in plan for byte in bytes_sent(bucket)) == bytes_in_order(tensor_bytes)


@given(sizes, source_lists, bucket_sizes)
def test_buckets_are_numbered_never_empty_and_never_too_large(
    tensor_bytes: list[int], sources: list[int], size: int
) -> None:
    plan = plan_buckets(tensor_bytes, sources, size)
    assert [bucket.index for bucket in plan] == list(range(len(plan)))
    assert all(1 <= bucket.num_bytes <= size for bucket in plan)
    assert all(piece.num_bytes > 0 for bucket in plan for piece in bucket.pieces)


@given(sizes, source_lists, bucket_sizes)
def test_large_tensors_travel_alone_and_small_ones_fill_their_buckets(
    tensor_bytes: list[int], sources: list[int], size: int
) -> None:
    plan = plan_buckets(tensor_bytes, sources, size)
    shared = [bucket for bucket in plan if any(tensor_bytes[p.tensor] * LONE_SHARE < size for p in bucket.pieces)]
    assert all(bucket.is_lone for bucket in plan if bucket not in shared)
    for bucket, following in itertools.pairwise(shared):
        assert bucket.num_bytes + following.pieces[0].num_bytes > size


@given(sizes, source_lists, bucket_sizes)
def test_no_source_sends_more_than_a_bucket_more_than_another(
    tensor_bytes: list[int], sources: list[int], size: int
) -> None:
    plan = plan_buckets(tensor_bytes, sources, size)
    loads = {source: sum(bucket.num_bytes for bucket in plan if bucket.source == source) for source in sources}
    assert sum(loads.values()) == sum(tensor_bytes), "a bucket has a sender that is not a source"
    assert max(loads.values()) - min(loads.values()) <= size


@given(sizes, source_lists, bucket_sizes)
def test_the_same_input_gives_the_same_plan(tensor_bytes: list[int], sources: list[int], size: int) -> None:
    """Sender and receiver make the plan on their own."""
    first = plan_buckets(tensor_bytes, sources, size)
    assert plan_buckets(tuple(tensor_bytes), tuple(sources), size) == first
    assert hash(first) == hash(plan_buckets(tensor_bytes, sources, size))


def test_a_plan_by_hand() -> None:
    assert plan_buckets([3, 0, 40, 2, 1], [7, 5], 32) == (
        Bucket(0, 7, 32, (Piece(2, 0, 0, 32),)),
        Bucket(1, 5, 8, (Piece(2, 32, 0, 8),)),
        Bucket(2, 5, 6, (Piece(0, 0, 0, 3), Piece(3, 0, 3, 2), Piece(4, 0, 5, 1))),
    )


def test_a_model_larger_than_a_bucket_takes_few_buckets() -> None:
    plan = plan_buckets([1 << 30], [0, 1, 2], DEFAULT_BUCKET_BYTES)
    assert len(plan) == (1 << 30) // DEFAULT_BUCKET_BYTES
    assert all(len(bucket.pieces) == 1 for bucket in plan)


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_below_one_byte_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"bucket_bytes={size}"):
        plan_buckets([1], [0], size)


def test_a_transfer_without_a_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one source"):
        plan_buckets([1], [], 8)
