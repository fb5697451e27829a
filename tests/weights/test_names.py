"""Weights under other names, fused and cast, on their way between processes."""

from pathlib import Path
from typing import Any

import torch
from tests.weights.cast import bits, publish, subscribe
from tests.worker.ranks import DEADLINE_S, meet, run_ranks

from keepstep.errors import MissingPart
from keepstep.protocol.transfer.names import Concat, Conversion, NameMap, NameRule, Shard
from keepstep.weights.memory.blocks import Block
from keepstep.weights.memory.mapping.mapped import Mapped

NAMES = NameMap(
    (NameRule("{layer}.qkv", Concat(tuple(Shard(f"{{layer}}.{each}", 0) for each in "qkv"))),), convert=Conversion.CAST
)
ROWS = {"q": 8, "k": 4, "v": 4}


def projections(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{layer}.{name}": torch.randn(rows, 48, generator=generator) for layer in "ab" for name, rows in ROWS.items()
    }


def expected(seed: int, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = projections(seed)
    return {
        f"{layer}.qkv": torch.cat([whole[f"{layer}.{name}"].chunk(2)[rank] for name in ROWS]).to(dtype)
        for layer in "ab"
    }


def half_of(tensor: torch.Tensor, rank: int) -> Block:
    rows = len(tensor) // 2
    return Block(tensor[rank * rows :][:rows].clone(), (rank * rows, 0), tuple(tensor.shape))


def fused_delivery(rank: int, size: int, path: Path, seed: int) -> Any:
    """Two fully sharded publishers, an engine of two tensor-parallel ranks, a misfit, and one that comes late."""
    if rank < 2:
        held = {name: half_of(tensor, rank) for name, tensor in projections(seed).items()}
        with publish(path, held, rank, 2, copies=True) as publisher:
            publisher.wait_for_consumers((2, 1)[rank], DEADLINE_S)
            failures = [f"{type(each).__name__}: {each}" for each in publisher.publish(1).failures]
            meet(path, size, "published")
            meet(path, size, "through")
            return failures
    if rank == 4:  # it wants a part that is not published
        wrong = Mapped({"a.qkv": torch.zeros(9, 48)}, NameMap((NameRule("a.qkv", Concat(("a.q", "a.bias"))),)))
        with subscribe(path, into=wrong, name="misfit") as consumer:
            try:
                consumer.receive(DEADLINE_S)
            except MissingPart as error:
                return str(error)
            finally:
                meet(path, size, "published")
                meet(path, size, "through")
        raise AssertionError
    dtype = torch.bfloat16 if rank < 4 else torch.float32
    own = {name: torch.zeros_like(tensor) for name, tensor in expected(seed, rank % 2, dtype).items()}
    if rank == 5:  # late, and it takes what was published as it is
        meet(path, size, "published")
    with subscribe(path, into=Mapped(own, NAMES.for_rank(rank % 2, 2)), device=rank % 2) as consumer:
        consumer.receive(DEADLINE_S)
        if rank != 5:
            meet(path, size, "published")
        meet(path, size, "through")
    return bits(own)


def test_two_shards_serve_an_engine_of_two_with_fused_names(tmp_path: Path, seed: int) -> None:
    first, second, *engines, misfit, late = run_ranks(6, fused_delivery, tmp_path, seed)
    assert first == ["MissingPart: misfit wants 'a.qkv', of which the part 'a.bias' is not published"]
    assert second == []
    assert misfit.endswith("misfit wants 'a.qkv', of which the part 'a.bias' is not published")
    assert engines == [bits(expected(seed, rank, torch.bfloat16)) for rank in range(2)]
    assert late == bits(expected(seed, 1, torch.float32))
