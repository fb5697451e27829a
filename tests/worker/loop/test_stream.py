"""Batches of a dataset that can only be read from the front: they go on where they stood."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset as HfDataset
from datasets import IterableDataset as HfIterable
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.stream import StreamReading, positioned
from keepstep.worker.values.attributes import State


class Numbers(IterableDataset[torch.Tensor]):
    """So many numbers, each with a random one, from where it stands."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.size:
            self.position += 1
            yield torch.tensor([float(self.position), torch.rand(()).item()])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.position = content["position"]


class Forgets(Numbers):
    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.position = 0


class Same(Numbers):
    """Four batches with the same content, and then others."""

    def __init__(self) -> None:
        super().__init__(12)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for found in super().__iter__():
            yield found if found[0] > 8 else torch.ones(2)


def reading(own: State, size: int = 10, accumulate: int = 1) -> StreamReading:
    return reading_of(DataLoader(Numbers(size), batch_size=2), own, accumulate)


def reading_of(loader: Any, own: State, accumulate: int = 1) -> StreamReading:
    return StreamReading(loader, 40, accumulate, own, 7, lambda: 1)


def fresh(held: dict[str, Any] | None = None) -> State:
    values = {"position": {}, "generators": [], "epoch": None, "begins_as_loaded": None} | (held or {})
    return State("batches", values, lambda _name: None)


def held_by(own: State) -> dict[str, Any]:
    """What a replacement gets."""
    return copy.deepcopy(own.state_dict())


def content(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: content(value) for key, value in found.items()}
    return [content(each) for each in found] if isinstance(found, list) else found.tolist()


def test_it_starts_over_where_it_ends() -> None:
    own = reading(fresh())
    assert [int(own.read(0, step)[0, 0]) for step in range(8)] == [1, 3, 5, 7, 9, 1, 3, 5]


def plain_text() -> HfDataset:
    return HfDataset.from_dict({"x": [[number / 24.0] for number in range(24)]})


def streamed(**shuffled: int) -> Any:
    data = plain_text().to_iterable_dataset(num_shards=4)
    return (data.shuffle(**shuffled) if shuffled else data).with_format("torch")


def rows() -> Iterator[dict[str, list[float]]]:
    yield from ({"x": [number / 24.0]} for number in range(24))


def generated() -> Any:
    data = HfIterable.from_generator(rows)
    return data.map(lambda row: {"y": row["x"] * 2}).with_format("torch")


def shuffled_map() -> Any:
    data = [torch.tensor([number / 24.0]) for number in range(24)]
    return StatefulDataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))


LOADERS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: DataLoader(Numbers(10), batch_size=2),
    "one batch": lambda: DataLoader(Numbers(2), batch_size=2),
    "the same everywhere": lambda: DataLoader(Same(), batch_size=2),
    "datasets": lambda: DataLoader(streamed(), batch_size=3),
    "datasets, one batch": lambda: DataLoader(streamed(), batch_size=24),
    "datasets, generated and mapped": lambda: DataLoader(generated(), batch_size=3),
    "torchdata over datasets": lambda: StatefulDataLoader(streamed(), batch_size=3),
    "torchdata over datasets, a worker": lambda: StatefulDataLoader(streamed(), batch_size=3, num_workers=1),
    "torchdata, shuffled": shuffled_map,
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.15
def test_a_step_that_is_repeated_reads_the_same_and_so_does_all_that_follows(name: str, accumulate: int) -> None:
    """On the same process, and on another one, which has what the former had when its last step counted."""
    own = fresh()
    undisturbed, whole, held = reading_of(LOADERS[name](), own, accumulate), [], [held_by(fresh())]
    for step in range(20):
        whole.append(content(undisturbed.read(0, step)))
        held.append(held_by(own))
    undisturbed.close()
    for at in (5,) if "worker" in name else (0, 1, 5, 8):  # its processes take long to start
        own = fresh()
        survivor = reading_of(LOADERS[name](), own, accumulate)
        assert [content(survivor.read(0, step)) for step in range(at)] == whole[:at]
        own.load_state_dict(copy.deepcopy(held[at]))
        survivor.close()
        assert [content(survivor.read(0, step)) for step in range(at, 20)] == whole[at:], at
        survivor.close()
        replacement = reading_of(LOADERS[name](), fresh(copy.deepcopy(held[at])), accumulate)
        assert [content(replacement.read(0, step)) for step in range(at, 20)] == whole[at:], at
        replacement.close()


@pytest.mark.parametrize("name", [name for name in LOADERS if "datasets" in name or "torchdata" in name])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.15
def test_the_order_is_the_loaders_own(name: str) -> None:
    loader = LOADERS[name]()
    whole = [content(batch) for _epoch in range(3) for batch in loader]
    mine = reading_of(LOADERS[name](), fresh())
    assert [content(mine.read(0, step)) for step in range(len(whole))] == whole
    mine.close()


def test_every_epoch_has_all_samples_also_after_a_failure_in_an_earlier_one() -> None:
    own = fresh()
    mine = reading_of(DataLoader(streamed(), batch_size=6), own)
    for step in range(6):
        mine.read(0, step)
    mine.close()
    later = [mine.read(0, step)["x"] for step in range(6, 12)]
    assert torch.cat(later[2:]).flatten().mul(24).round().tolist() == list(range(24))


def test_the_epoch_of_a_dataset_comes_with_its_position() -> None:
    """The script has called set_epoch(), which a replacement does not do again."""
    data, own = streamed(), fresh()
    mine = reading_of(DataLoader(data, batch_size=6), own)
    for step in range(4):
        mine.read(0, step)
    data.set_epoch(1)
    mine.read(0, 4)
    held = held_by(own)
    expected = [content(mine.read(0, step)) for step in range(5, 8)]
    other = reading_of(DataLoader(streamed(), batch_size=6), fresh(held))
    assert [content(other.read(0, step)) for step in range(5, 8)] == expected


def test_what_the_script_draws_does_not_depend_on_a_repetition() -> None:
    own = fresh()
    mine = reading_of(DataLoader(streamed(), batch_size=3), own)
    mine.read(0, 0)
    drawn = []
    for closes in (False, True):
        if closes:
            mine.close()
        torch.manual_seed(5)
        mine.read(0, 1)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(streamed(seed=0, buffer_size=8), batch_size=2),
        lambda: StatefulDataLoader(streamed(seed=0, buffer_size=8), batch_size=2),
        lambda: DataLoader(Forgets(9), batch_size=2),
    ],
    ids=["a shuffle buffer", "a shuffle buffer under torchdata", "a state that says nothing"],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.15
def test_a_loader_that_does_not_go_on_where_its_state_says_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="does not go on where its state_dict\\(\\) says"):
        reading_of(make(), fresh()).read(0, 0)


def test_a_loader_without_a_position_is_refused() -> None:
    for loader in (DataLoader(range(3)), DataLoader(Numbers(3), num_workers=1), [1, 2]):  # type: ignore[arg-type]  # not torch's
        with pytest.raises(ConfigurationError, match="has no position to come back to"):
            positioned(loader)


def test_an_empty_one_is_refused_when_it_is_read() -> None:
    with pytest.raises(UsageError, match="DataLoader gives no batch"):
        reading(fresh(), size=0).read(0, 0)
