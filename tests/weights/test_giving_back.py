"""A restarted trainer takes its weights from engines: bit for bit, or not at all."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.weights.cast import SMALL_BUCKET_BYTES, bits, subscribe
from tests.worker.ranks import DEADLINE_S

from keepstep.errors import (
    BaseMismatch,
    DtypeMismatch,
    KeepstepError,
    MissingPart,
    PeerLost,
    UnknownTensor,
    UsageError,
    WeightsNotReady,
)
from keepstep.protocol.transfer.names import Concat, Conversion, NameMap, NameRule, Quantize, Recipe, Shard
from keepstep.weights.giving_back import give_back, take_back
from keepstep.weights.memory.blocks import Block
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import Buffers, Publisher

Tensors = dict[str, torch.Tensor]
QKV = Concat((Shard("q", 0), Shard("k", 0)))
NAMES = NameMap((NameRule("qk", QKV),), convert=Conversion.CAST)
SOON_S = 0.2


def state(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 40), "k": (4, 40), "norm": (40,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Engines:
    """Tensor-parallel ranks with fused names, which took version 7 of a trainer that is gone."""

    def __init__(self, path: Path, published: Tensors, num: int, dtype: torch.dtype = torch.float32) -> None:
        self.threads = ThreadPoolExecutor(4)
        self.num = num
        self.own: list[Tensors] = [
            {"qk": torch.zeros(12 // num, 40, dtype=dtype), "norm": torch.zeros(40)} for _ in range(num)
        ]
        self.subscribers = [
            subscribe(path / "there", into=Mapped(own, NAMES.for_rank(rank, num)), name=f"engine {rank}")
            for rank, own in enumerate(self.own)
        ]
        with Publisher(path / "there", published, buffers=Buffers(SMALL_BUCKET_BYTES)) as publisher:
            taken = [self.threads.submit(each.receive, DEADLINE_S) for each in self.subscribers]
            publisher.wait_for_consumers(num, DEADLINE_S)
            assert publisher.publish(7).failures == ()
            assert [each.result(DEADLINE_S) for each in taken] == [7] * num

    def give_back(self, path: Path, **settings: Any) -> list[Future[int]]:
        settings = {"timeout_s": DEADLINE_S} | settings
        return [
            self.threads.submit(give_back, each, path / "back", rank=rank, world_size=self.num, **settings)
            for rank, each in enumerate(self.subscribers)
        ]

    def close(self) -> None:
        for each in self.subscribers:
            each.close()
        self.threads.shutdown()


def taken_back(path: Path, into: Any, version: int = 7) -> None:
    take_back(path / "back", into, version, timeout_s=DEADLINE_S)


def half_like(tensor: torch.Tensor, rank: int) -> Block:
    rows = len(tensor) // 2
    start = (rank * rows, *[0] * (tensor.dim() - 1))
    return Block(torch.zeros(rows, *tensor.shape[1:]), start, tuple(tensor.shape))


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_trainer_takes_its_shards_from_fused_engines(num_engines: int, tmp_path: Path, seed: int) -> None:
    published = state(seed)
    engines = Engines(tmp_path, {name: tensor.clone() for name, tensor in published.items()}, num_engines)
    before = [bits(own) for own in engines.own]
    given = engines.give_back(tmp_path, num_trainers=2)
    halves = [{name: half_like(each, rank) for name, each in published.items()} for rank in range(2)]
    taking = [engines.threads.submit(two_trainers, tmp_path, half, rank) for rank, half in enumerate(halves)]
    for each in taking:
        each.result(DEADLINE_S)
    assert [each.result(DEADLINE_S) for each in given] == [7] * num_engines
    whole = {name: torch.cat([half[name].tensor for half in halves]) for name in published}
    assert bits(whole) == bits(published)
    assert [bits(own) for own in engines.own] == before
    engines.close()


def two_trainers(path: Path, into: Any, rank: int) -> None:
    with subscribe(path / "back", into=into, name=f"trainer {rank}", deadline_s=DEADLINE_S) as subscriber:
        subscriber.only_version = 7
        subscriber.receive(DEADLINE_S)


def test_another_version_is_not_taken(tmp_path: Path, seed: int) -> None:
    engines = Engines(tmp_path, state(seed), 1)
    (given,) = engines.give_back(tmp_path)
    own = state(seed + 1)
    with pytest.raises(BaseMismatch, match="version 7 comes, and version 8 is wanted"):
        taken_back(tmp_path, own, 8)
    with pytest.raises(KeepstepError, match=r"version 8 is wanted|has closed the connection"):  # which is seen first
        given.result(DEADLINE_S)
    assert bits(own) == bits(state(seed + 1))
    engines.close()


def test_what_was_cast_is_not_given_back(tmp_path: Path, seed: int) -> None:
    engines = Engines(tmp_path, state(seed), 1, torch.bfloat16)
    (given,) = engines.give_back(tmp_path)
    told = "'q' was published as float32 and is bfloat16 here, in 'qk': it cannot be given back bit for bit"
    with pytest.raises(DtypeMismatch, match=told):
        given.result(DEADLINE_S)
    engines.close()


def test_what_was_quantized_is_not_given_back(tmp_path: Path, seed: int) -> None:
    own = {"q": torch.zeros(8, 40).to(torch.float8_e4m3fn), "s": torch.zeros(1)}
    into = Mapped(own, NameMap((NameRule("q", "q", Quantize("s")),)))
    with Publisher(tmp_path, state(seed)) as publisher, subscribe(tmp_path, into=into) as subscriber:
        subscriber.start()
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(1)
        subscriber.wait_for(1, DEADLINE_S)
        with pytest.raises(DtypeMismatch, match="'q' was published as float32 and is float8_e4m3fn here"):
            give_back(subscriber, tmp_path / "back", timeout_s=SOON_S)


@pytest.mark.parametrize(
    ("recipe", "rows", "kind", "told"),
    [
        ("q", 8, UnknownTensor, "wants 'k', which is not published"),
        (Shard("q", 0), 4, MissingPart, r"no source holds 'q' at \[0, 0\]"),
    ],
    ids=["other tensors", "other rows"],
)
def test_an_engine_that_has_not_everything_gives_nothing(
    recipe: Recipe, rows: int, kind: type[KeepstepError], told: str, tmp_path: Path, seed: int
) -> None:
    into = Mapped({"q": torch.zeros(rows, 40)}, NameMap((NameRule("q", recipe),), tp_rank=1, tp_size=2))
    own, before = state(seed + 1), bits(state(seed + 1))
    with (
        Publisher(tmp_path / "there", state(seed)) as publisher,
        subscribe(tmp_path / "there", into=into) as subscriber,
        ThreadPoolExecutor(1) as threads,
    ):
        subscriber.start()
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(7)
        subscriber.wait_for(7, DEADLINE_S)
        given = threads.submit(give_back, subscriber, tmp_path / "back", timeout_s=DEADLINE_S)
        with pytest.raises(kind, match=told):
            taken_back(tmp_path, own if kind is UnknownTensor else {"q": own["q"]})
        with pytest.raises(kind, match=told):
            given.result(DEADLINE_S)
    assert bits(own) == before


def test_who_has_nothing_gives_nothing(tmp_path: Path) -> None:
    with subscribe(tmp_path, into={"q": torch.zeros(1)}) as subscriber, pytest.raises(WeightsNotReady):
        give_back(subscriber, tmp_path / "back")
    with (
        subscribe(tmp_path, load=lambda name, tensor: None) as subscriber,
        pytest.raises(UsageError, match="holds no weights"),
    ):
        subscriber.as_published()


def test_trainers_that_do_not_come_and_engines_that_do_not(tmp_path: Path, seed: int) -> None:
    engines = Engines(tmp_path, state(seed), 1)
    (given,) = engines.give_back(tmp_path, timeout_s=SOON_S)
    with pytest.raises(PeerLost, match="0 of 1 consumers came"):
        given.result(DEADLINE_S)
    with pytest.raises(PeerLost):
        take_back(tmp_path / "back", state(seed), 7, timeout_s=SOON_S)
    engines.close()


def test_what_is_in_use_is_given_back_after_several_versions(tmp_path: Path, seed: int) -> None:
    """A module's two sets of tensors change places with each version."""
    torch.manual_seed(seed)
    trainer, engine, again = (torch.nn.Linear(9, 5) for _ in range(3))
    with (
        Publisher(tmp_path / "there", trainer) as publisher,
        subscribe(tmp_path / "there", into=engine) as subscriber,
        ThreadPoolExecutor(1) as threads,
    ):
        subscriber.start()
        publisher.wait_for_consumers(1, DEADLINE_S)
        for version in range(3):
            torch.nn.init.normal_(trainer.weight)
            publisher.publish(version)
            subscriber.wait_for(version, DEADLINE_S)
            given = threads.submit(give_back, subscriber, tmp_path / "back", timeout_s=DEADLINE_S)
            taken_back(tmp_path, again, version)
            assert given.result(DEADLINE_S) == version
            assert bits(dict(again.state_dict())) == bits(dict(trainer.state_dict()))
