"""Weights on their way from the ranks that hold them to consumers in other processes: every bit arrives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import SMALL_BUCKET_BYTES, bits, publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.protocol.transfer.consumer import Condition
from keepstep.weights.memory.blocks import Block

Tensors = dict[str, torch.Tensor]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.bool,
    torch.float64,
    torch.int64,
    torch.complex64,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A tensor of any bits that are values of its dtype."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.rand(count, generator=generator) > 0.5).reshape(shape)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def mixed(seed: int) -> Tensors:
    """Every dtype in several shapes, orders of memory and sizes."""
    g = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found |= {
            f"{name}.matrix": random_bits((7, 5), dtype, g),
            f"{name}.scalar": random_bits((), dtype, g),
            f"{name}.empty": random_bits((0, 3), dtype, g),
            f"{name}.large": random_bits((3, SMALL_BUCKET_BYTES // 2 + 1), dtype, g),
            f"{name}.transposed": random_bits((9, 4), dtype, g).t(),
            f"{name}.every_second": random_bits((40,), dtype, g)[::2],
            f"{name}.cut_out": random_bits((6, 8), dtype, g)[1:4, 2:7],
        }
    found["tied"] = found["float32.matrix"]
    found["one_row_larger_than_a_bucket"] = random_bits((2, 2 * SMALL_BUCKET_BYTES), torch.float32, g)
    return found


def tiny(seed: int) -> Tensors:
    """Ten thousand small tensors."""
    g = torch.Generator().manual_seed(seed)
    return {f"t{index}": random_bits((index % 5,), torch.float32, g) for index in range(10_000)}


MODELS: dict[str, Callable[[int], Tensors]] = {"mixed": mixed, "tiny": tiny}


def whole_delivery(
    rank: int, size: int, path: Path, model: str, num_devices: int, how: str, bucket_bytes: int, seed: int
) -> Any:
    """Replicas on all devices, one consumer on each; three versions. What each has of the last one."""
    versions = [MODELS[model](seed + number) for number in range(3)]
    if rank < num_devices:
        live = {name: tensor.clone() if tensor.is_contiguous() else tensor for name, tensor in versions[0].items()}
        with publish(path, live, rank, num_devices, bucket_bytes=bucket_bytes) as publisher:
            publisher.wait_for_consumers(1, DEADLINE_S)
            for number, weights in enumerate(versions):
                for name, tensor in weights.items():
                    live[name].copy_(tensor)
                assert publisher.publish(number).failures == ()
            meet(path, size, "through")
            return bits(live)
    taken: Tensors = {}
    own = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
    target = {"load": lambda name, tensor: taken.update({name: tensor.clone()})} if how == "function" else {"into": own}
    with subscribe(path, device=rank - num_devices, atomic=how == "atomic", **target) as consumer:
        for number in range(3):
            assert consumer.receive(DEADLINE_S) == number
            with consumer.using() as version:
                assert version == number
        assert consumer.condition is Condition.READY
        meet(path, size, "through")
    return bits(taken if how == "function" else own)


@pytest.mark.parametrize("how", ["atomic", "in place", "function"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_bit_of_every_dtype_arrives(num_devices: int, how: str, tmp_path: Path, seed: int) -> None:
    arguments = (tmp_path, "mixed", num_devices, how, SMALL_BUCKET_BYTES, seed)
    answers = run_ranks(2 * num_devices, whole_delivery, *arguments)
    assert len(answers[0]) == 7 * len(DTYPES) + 2
    assert all(answer == answers[0] for answer in answers)


def test_ten_thousand_tiny_tensors(tmp_path: Path, seed: int) -> None:
    answers = run_ranks(4, whole_delivery, tmp_path, "tiny", 2, "atomic", 1 << 16, seed)
    assert len(answers[0]) == 10_000
    assert all(answer == answers[0] for answer in answers)


# ---- shards ---------------------------------------------------------------------------------------------------------


def share_of(tensor: torch.Tensor, dim: int, index: int, parts: int) -> Block:
    """One of several parts along a dimension, as equal as torch.chunk makes them; the last ones may be empty."""
    size = -(-tensor.shape[dim] // parts)
    start = min(index * size, tensor.shape[dim])
    first = tuple(start if each == dim else 0 for each in range(tensor.dim()))
    length = min(size, tensor.shape[dim] - start)
    return Block(tensor.narrow(dim, start, length).clone(), first, tuple(tensor.shape))


def sharded(seed: int) -> Tensors:
    """Matrices that are cut by rows and by columns."""
    g = torch.Generator().manual_seed(seed)
    return {
        "column": random_bits((64, 24), torch.float32, g),
        "row": random_bits((24, 64), torch.bfloat16, g),
        "odd": random_bits((7, 11), torch.float32, g),
        "whole": random_bits((5,), torch.float32, g),
    }


CUTS = {"column": 0, "row": 1, "odd": 0}


def shards(weights: Tensors, index: int, parts: int) -> dict[str, torch.Tensor | Block]:
    """What one of several tensor-parallel or sharded ranks holds."""
    return {
        name: share_of(tensor, CUTS[name], index, parts) if name in CUTS else tensor.clone()
        for name, tensor in weights.items()
    }


def sharded_delivery(rank: int, size: int, path: Path, sources: int, consumers: int, seed: int) -> Any:
    weights = sharded(seed)
    if rank < sources:
        with publish(path, shards(weights, rank, sources), rank, sources) as publisher:
            meet(path, size, "attached")
            published = publisher.publish(1)
            meet(path, size, "through")
            return len(published.failures)
    index = rank - sources
    own = shards({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, index, consumers)
    with subscribe(path, into=own, device=index % sources, name=f"engine {index}") as consumer:
        consumer.attach(DEADLINE_S)
        meet(path, size, "attached")
        consumer.receive(DEADLINE_S)
        meet(path, size, "through")
    expected = shards(weights, index, consumers)
    return bits(locals_of(own)) == bits(locals_of(expected))


def locals_of(weights: dict[str, torch.Tensor | Block]) -> Tensors:
    return {name: value.tensor if isinstance(value, Block) else value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("sources", "consumers"), [(2, 1), (1, 2), (4, 2), (2, 4), (3, 1), (3, 2)], ids=lambda number: str(number)
)
def test_shards_arrive_where_they_belong(sources: int, consumers: int, tmp_path: Path, seed: int) -> None:
    answers = run_ranks(sources + consumers, sharded_delivery, tmp_path, sources, consumers, seed)
    assert answers[sources:] == [True] * consumers
    assert answers[:sources] == [0] * sources
