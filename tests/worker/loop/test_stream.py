"""Batches of a dataset that can only be read from the front: they go on where they stood."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

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


def reading(own: State, size: int = 10, accumulate: int = 1) -> StreamReading:
    return StreamReading(DataLoader(Numbers(size), batch_size=2), 8, accumulate, own, 7, lambda: 1)


def fresh() -> State:
    return State("batches", {"position": {}}, lambda _name: None)


def content(found: Any) -> Any:
    return [each.tolist() for each in found] if isinstance(found, list) else found.tolist()


def test_it_starts_over_where_it_ends() -> None:
    own = reading(fresh())
    assert [int(own.read(0, step)[0, 0]) for step in range(8)] == [1, 3, 5, 7, 9, 1, 3, 5]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 4, 5])
def test_a_step_that_is_repeated_reads_the_same(at: int, accumulate: int) -> None:
    """Also on another process, which has what the former one had when its last step counted."""
    whole = [content(reading(fresh(), accumulate=accumulate).read(0, 0))]
    own = fresh()
    mine = reading(own, accumulate=accumulate)
    whole, positions = [], [own.position]
    for step in range(8):
        whole.append(content(mine.read(0, step)))
        positions.append(own.position)
    own.position = positions[at]
    assert [content(mine.read(0, step)) for step in range(at, 8)] == whole[at:]
    other = fresh()
    other.position = positions[at]
    assert [content(reading(other, accumulate=accumulate).read(0, at))] == whole[at : at + 1]


def test_a_loader_without_a_position_is_refused() -> None:
    for loader in (DataLoader(range(3)), DataLoader(Numbers(3), num_workers=1), [1, 2]):  # type: ignore[arg-type]  # not torch's
        with pytest.raises(ConfigurationError, match="has no position to come back to"):
            positioned(loader)


def test_an_empty_one_is_refused_when_it_is_read() -> None:
    with pytest.raises(UsageError, match="DataLoader gives no batch"):
        reading(fresh(), size=0).read(0, 0)
