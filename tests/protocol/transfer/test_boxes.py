"""Blocks of a tensor, against lists of their single elements."""

import itertools
import operator
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.protocol.transfer.cases import boxes_in, indices

from keepstep.protocol.transfer.boxes import Box, cells, whole


def spaces(num_dims: int) -> st.SearchStrategy[Box]:
    """Parts of a space of so many dimensions that does not begin at zero."""
    return boxes_in(Box((2,) * num_dims, (6, 5, 4)[:num_dims]))


boxes = st.integers(0, 3).flatmap(spaces)
box_lists = st.integers(0, 3).flatmap(lambda num_dims: st.lists(spaces(num_dims), max_size=5))
pairs = st.integers(0, 3).flatmap(lambda num_dims: st.tuples(spaces(num_dims), spaces(num_dims)))
nested_pairs = boxes.flatmap(lambda outer: st.tuples(st.just(outer), boxes_in(outer)))


# ---- One box --------------------------------------------------------------------------------------------------------


@given(boxes)
def test_a_box_has_as_many_elements_as_it_has_indices(box: Box) -> None:
    assert box.num_elements == len(indices(box))


@given(boxes)
def test_the_stop_of_a_box_is_just_behind_its_last_index(box: Box) -> None:
    if box.num_elements:
        assert box.stop == tuple(index + 1 for index in indices(box)[-1])
    else:
        assert any(first == stop for first, stop in zip(box.start, box.stop, strict=True))


@given(st.one_of(pairs, nested_pairs))
def test_a_box_holds_what_has_all_its_elements_there(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    if inner.num_elements:
        assert outer.holds(inner) == (set(indices(inner)) <= set(indices(outer)))


@given(nested_pairs)
def test_a_box_holds_its_parts_and_an_empty_one_is_among_them(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    assert outer.holds(inner)


@given(st.one_of(pairs, nested_pairs))
def test_seen_from_another_box_its_indices_count_from_there(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    seen = inner.seen_from(outer)
    assert seen.shape == inner.shape
    assert [tuple(map(operator.add, index, outer.start)) for index in indices(seen)] == indices(inner)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_all_of_a_tensor(shape: tuple[int, ...]) -> None:
    assert indices(whole(shape)) == list(itertools.product(*map(range, shape)))


# ---- Cutting --------------------------------------------------------------------------------------------------------


@given(boxes, st.integers(1, 130))
@example(Box((), ()), 1)
@example(Box((2, 0, 3), (4, 0, 2)), 1)
@example(Box((2, 1), (3, 7)), 7)
@example(Box((2, 1), (3, 7)), 6)
def test_the_parts_of_a_cut_follow_each_other_in_row_major_order(box: Box, max_elements: int) -> None:
    """So they are disjoint, and together all of it."""
    parts = list(box.cut(max_elements))
    assert [index for part in parts for index in indices(part)] == indices(box)
    assert all(part.num_elements <= max_elements for part in parts)
    assert len(parts) == 1 or all(part.num_elements for part in parts)


@given(boxes, st.integers(1, 130))
def test_no_two_parts_of_a_cut_could_have_stayed_one(box: Box, max_elements: int) -> None:
    for part, following in itertools.pairwise(box.cut(max_elements)):
        hull = Box(part.start, tuple(map(operator.sub, following.stop, part.start)))
        is_box = indices(hull) == [*indices(part), *indices(following)]
        assert not is_box or hull.num_elements > max_elements


@pytest.mark.parametrize(
    ("box", "max_elements", "parts"),
    [
        (Box((), ()), 1, [Box((), ())]),
        (Box((3,), (5,)), 5, [Box((3,), (5,))]),
        (Box((3,), (5,)), 2, [Box((3,), (2,)), Box((5,), (2,)), Box((7,), (1,))]),
        (Box((1, 4), (5, 3)), 8, [Box((1, 4), (2, 3)), Box((3, 4), (2, 3)), Box((5, 4), (1, 3))]),
        (Box((1, 4), (2, 3)), 2, [Box((row, col), (1, size)) for row in (1, 2) for col, size in ((4, 2), (6, 1))]),
        (Box((0, 1, 0), (1, 3, 2)), 4, [Box((0, 1, 0), (1, 2, 2)), Box((0, 3, 0), (1, 1, 2))]),
        (Box((0, 5), (0, 3)), 1, [Box((0, 5), (0, 3))]),
    ],
)
def test_cuts_by_hand(box: Box, max_elements: int, parts: list[Box]) -> None:
    assert list(box.cut(max_elements)) == parts


# ---- Cells ----------------------------------------------------------------------------------------------------------


@given(box_lists)
def test_cells_are_disjoint_never_empty_and_fill_the_space_between_the_outermost_edges(boxes: list[Box]) -> None:
    found = list(cells(boxes))
    assert all(cell.num_elements for cell in found)
    counted = Counter(index for cell in found for index in indices(cell))
    assert set(counted.values()) <= {1}
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    hull = set(indices(Box(start, tuple(map(operator.sub, stop, start))))) if boxes else set()
    assert set(counted) == hull


@given(box_lists)
def test_each_box_is_a_union_of_cells(boxes: list[Box]) -> None:
    found = list(cells(boxes))
    for box in boxes:
        inside = set(indices(box))
        for cell in found:
            assert len(inside & set(indices(cell))) in (0, cell.num_elements)


@given(box_lists)
def test_cells_are_cut_at_the_edges_of_boxes_only_and_come_in_row_major_order(boxes: list[Box]) -> None:
    found = list(cells(boxes))
    assert [cell.start for cell in found] == sorted(cell.start for cell in found)
    for cell in found:
        for dim in range(len(cell.shape)):
            edges = {edge for box in boxes for edge in (box.start[dim], box.stop[dim])}
            assert {cell.start[dim], cell.stop[dim]} <= edges


def test_cells_by_hand() -> None:
    left, right_below = Box((0, 0), (4, 2)), Box((2, 2), (2, 3))
    assert list(cells([left, right_below])) == [
        Box((0, 0), (2, 2)),
        Box((0, 2), (2, 3)),
        Box((2, 0), (2, 2)),
        Box((2, 2), (2, 3)),
    ]
    assert list(cells([])) == []
    assert list(cells([Box((), ()), Box((), ())])) == [Box((), ())]
