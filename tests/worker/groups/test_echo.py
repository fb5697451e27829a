"""What each operation leaves behind in echo."""

import pytest
import torch

from keepstep.worker.groups import echo

SIZES = [1, 2, 3, 5]
SHAPES = [(4,), (2, 3), (), (0,), (1, 2, 2)]


def numbers(*shape: int, start: int = 1) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_to_all_puts_the_own_tensor_in_every_place(size: int, shape: tuple[int, ...]) -> None:
    sources = [numbers(*shape), numbers(*shape, start=50)]
    outputs = [[torch.full(shape, -1.0) for _ in range(size)] for _ in sources]
    echo.to_all(outputs, sources)
    for places, source in zip(outputs, sources, strict=True):
        assert all(torch.equal(place, source) for place in places)


def test_to_all_does_nothing_where_there_is_no_output() -> None:
    source = numbers(3)
    echo.to_all([], [source])  # gather on all ranks but the root
    assert torch.equal(source, numbers(3))


def test_to_all_may_hold_its_own_source() -> None:
    source = numbers(3)
    other = torch.zeros(3)
    echo.to_all([[source, other]], [source])
    assert torch.equal(source, numbers(3))
    assert torch.equal(other, numbers(3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_to_all_flat_repeats_the_source(size: int, shape: tuple[int, ...]) -> None:
    source = numbers(*shape)
    output = torch.full((size, *shape), -1.0)
    echo.to_all_flat(output, source)
    assert torch.equal(output, source.expand(size, *shape))


@pytest.mark.parametrize("size", SIZES)
def test_to_all_flat_takes_a_source_that_lies_in_the_output(size: int) -> None:
    """FSDP2 gathers in place: what a rank gives is its own part of what it gets."""
    for rank in range(size):
        output = numbers(size, 3)
        expected = output[rank].clone().expand(size, 3)
        echo.to_all_flat(output, output[rank])
        assert torch.equal(output, expected)


@pytest.mark.parametrize("size", SIZES)
def test_own_of_takes_this_ranks_place(size: int) -> None:
    for rank in range(size):
        inputs = [[numbers(3, start=10 * place) for place in range(size)]]
        outputs = [torch.full((3,), -1.0)]
        echo.own_of(outputs, inputs, rank)
        assert torch.equal(outputs[0], numbers(3, start=10 * rank))


def test_own_of_leaves_the_output_where_there_is_no_input() -> None:
    outputs = [torch.full((3,), -1.0)]
    echo.own_of(outputs, [], 1)  # scatter on all ranks but the root
    assert torch.equal(outputs[0], torch.full((3,), -1.0))


@pytest.mark.parametrize("size", SIZES)
def test_own_of_flat_takes_this_ranks_part(size: int) -> None:
    for rank in range(size):
        source = numbers(size * 2, 3)
        output = torch.full((2, 3), -1.0)
        echo.own_of_flat(output, source, rank)
        assert torch.equal(output, source[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("size", SIZES)
def test_own_to_all_gives_every_place_what_this_rank_sends_itself(size: int) -> None:
    for rank in range(size):
        inputs = [numbers(2, start=10 * place) for place in range(size)]
        outputs = [torch.full((2,), -1.0) for _ in range(size)]
        echo.own_to_all(outputs, inputs, rank)
        assert all(torch.equal(output, inputs[rank]) for output in outputs)


def test_own_to_all_leaves_a_place_of_another_size() -> None:
    outputs = [torch.full((2,), -1.0), torch.full((5,), -1.0)]
    echo.own_to_all(outputs, [numbers(2), numbers(5)], 0)
    assert torch.equal(outputs[0], numbers(2))
    assert torch.equal(outputs[1], torch.full((5,), -1.0))


@pytest.mark.parametrize(("rows", "source_rows"), [(4, 4), (6, 4), (3, 4), (1, 2), (0, 3)])
def test_own_to_all_flat_repeats_the_own_rows(rows: int, source_rows: int) -> None:
    source, output = numbers(source_rows, 2), torch.full((rows, 2), -1.0)
    echo.own_to_all_flat(output, source)
    expected = source.repeat(2, 1)[:rows]
    assert torch.equal(output, expected)


def test_own_to_all_flat_leaves_the_output_where_nothing_was_sent() -> None:
    output = torch.full((3, 2), -1.0)
    echo.own_to_all_flat(output, torch.zeros(0, 2))
    assert torch.equal(output, torch.full((3, 2), -1.0))


def test_a_tensor_that_requires_grad_is_filled_and_stays_a_leaf() -> None:
    output = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        echo.to_all([[output]], [numbers(3)])
        echo.own_of([output], [[numbers(3, start=7)]], 0)
    assert output.is_leaf
    assert torch.equal(output.detach(), numbers(3, start=7))
    rows = torch.zeros(3, 1, requires_grad=True)
    echo.own_to_all_flat(rows, numbers(3, 1))
    assert torch.equal(rows.detach(), numbers(3, 1))
