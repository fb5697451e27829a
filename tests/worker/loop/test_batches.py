"""The order of a torch loader, found again from any step on, and the batches of the steps."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.batches import Batches
from keepstep.worker.loop.late_rank import have_samplers_wait


class Step:
    """What the loop is handed."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.epoch, self.is_epoch_end = None, False


class Numbers(Dataset[torch.Tensor]):
    """Its samples are their indices, each with a random number where that is wanted."""

    def __init__(self, size: int, draws: bool = False) -> None:
        self.size, self.draws = size, draws

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.draws:
            return torch.tensor(index)
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


def of(loader: Any, steps: Any = None, *, epochs: int = 3, accumulate: int = 1, seed: int = 5) -> Batches:
    """Batches of a script that is handed these steps, or all in their order."""

    def hand_out(num_steps: int) -> Iterator[Any]:
        return iter([Step(index) for index in (range(num_steps) if steps is None else steps)])

    return Batches(loader, epochs, accumulate, seed, hand_out, lambda: 1)


def content(batches: Batches) -> list[Any]:
    return [[each.tolist() for each in batch] if isinstance(batch, list) else batch.tolist() for _, batch in batches]


def distributed(shuffle: bool = True, drop_last: bool = False) -> DataLoader[Any]:
    dataset = Numbers(23)
    sampler = DistributedSampler(dataset, 2, 1, shuffle=shuffle, seed=3, drop_last=drop_last)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


def with_generator(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(11), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9), **options)


def plain(loader: DataLoader[Any], epochs: int = 3) -> list[Any]:
    """What a loop over the loader itself gives."""
    found = []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        found += [batch.tolist() for batch in loader]
    return found


def weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    sampler = WeightedRandomSampler(torch.arange(1.0, 12.0), 9, generator=generator)
    return DataLoader(Numbers(11), batch_sampler=BatchSampler(sampler, 2, drop_last=False))


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(11), batch_size=4),
    "dropping the last": lambda: DataLoader(Numbers(11), batch_size=4, drop_last=True),
    "distributed": distributed,
    "distributed, in order": lambda: distributed(shuffle=False, drop_last=True),
    "shuffled by a generator": with_generator,
    "a generator and workers": lambda: with_generator(num_workers=1, multiprocessing_context="fork"),
    "a generator and workers that stay": lambda: with_generator(
        num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ),
    "weighted": weighted,
    "one by one": lambda: DataLoader(Numbers(5), batch_size=None),
    "by a list": lambda: DataLoader(Numbers(11), batch_sampler=[[3, 1], [2], [10, 9, 8]]),
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_order_is_that_of_a_loop_over_the_loader(make: Any) -> None:
    assert content(of(make())) == plain(make())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_step_is_found_by_itself(make: Any) -> None:
    """As a replacement does, and a rank that goes back."""
    in_order = content(of(make()))
    jumps = [*range(len(in_order))]
    random.Random(4).shuffle(jumps)
    assert content(of(make(), jumps)) == [in_order[index] for index in jumps]


def test_without_a_generator_the_order_follows_from_the_seed_alone() -> None:
    loader = DataLoader(Numbers(50), batch_size=10, shuffle=True)
    torch.manual_seed(1)
    found = content(of(loader))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert content(of(loader)) == found
    assert torch.equal(torch.get_rng_state(), before), "the training's own random numbers are not touched"
    assert content(of(loader, seed=6)) != found
    epochs = [found[:5], found[5:10], found[10:]]
    assert all(sorted(index for batch in epoch for index in batch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]


class Drawing(SequentialSampler):
    """Draws in the middle of an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(100) for _ in range(2)] + [int(np.random.randint(100)) for _ in range(2)])

    def __len__(self) -> int:
        return 4


def test_what_a_sampler_draws_does_not_depend_on_the_script() -> None:
    loader = DataLoader(Numbers(100), batch_size=1, sampler=Drawing(range(4)))
    found = content(of(loader))
    random.seed(1)
    np.random.seed(1)
    assert content(of(loader)) == found
    assert found[:4] != found[4:8]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_augmentation_belongs_to_the_batch() -> None:
    def loader(num_workers: int) -> DataLoader[Any]:
        context = "fork" if num_workers else None
        return DataLoader(
            Numbers(6, draws=True), batch_size=2, num_workers=num_workers, multiprocessing_context=context
        )

    found = content(of(loader(0)))
    assert content(of(loader(2))) == found
    assert content(of(loader(0), [4, 1, 4])) == [found[4], found[1], found[4]]
    assert found[0][0][1:] != found[3][0][1:], "another epoch draws other numbers"


def test_a_step_that_comes_again_has_the_same_batch() -> None:
    batches = of(DataLoader(Numbers(8), batch_size=2), [1, 1, 1, 2])
    found = []
    for _step, batch in batches:
        found.append((batch.tolist(), id(batch)))
        if len(found) == 2:
            batch.zero_()  # in place: it cannot be used again
    assert [values for values, _ in found] == [[2, 3], [2, 3], [2, 3], [4, 5]]
    assert found[0][1] == found[1][1]


def test_what_may_have_been_changed_unseen_is_read_again() -> None:
    batches = of(DataLoader(Numbers(8), batch_size=2, collate_fn=lambda samples: np.stack(samples)), [1, 1])
    (_, first), (_, second) = batches
    assert first is not second
    assert (first == second).all()


def test_accumulation_gives_lists() -> None:
    loader = DataLoader(Numbers(10), batch_size=2)
    batches = of(loader, epochs=2, accumulate=2)
    assert (len(batches), batches.steps_per_epoch) == (6, 3)
    assert content(batches) == 2 * [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]


def test_steps_know_their_epoch() -> None:
    found = [(step.epoch, step.is_epoch_end) for step, _batch in of(DataLoader(Numbers(4), batch_size=2), epochs=2)]
    assert found == [(0, False), (0, True), (1, False), (1, True)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unknown(SequentialSampler):
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        ([1, 2], {}, "give it a torch DataLoader"),
        (DataLoader(Stream()), {}, "IterableDataset, in which no batch can be found again"),
        (DataLoader(Numbers(3), batch_size=4, drop_last=True), {}, "has no batch"),
        (DataLoader(Numbers(3), batch_sampler=Unknown(range(3))), {}, "Unknown has no length"),
        (DataLoader(Numbers(3)), {"epochs": 0}, "epochs must be at least 1"),
        (DataLoader(Numbers(3)), {"accumulate": 0}, "accumulate must be at least 1"),
    ],
)
def test_what_cannot_be(loader: Any, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        of(loader, **options)


class Miscounted(SequentialSampler):
    """Says another length than it has."""

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(("size", "how"), [(3, "more"), (1, "fewer")])
def test_a_sampler_that_says_a_wrong_length_is_found_out(size: int, how: str) -> None:
    batches = of(DataLoader(Numbers(9), batch_size=1, sampler=Miscounted(range(size))), [0, 1, 2])
    with pytest.raises(UsageError, match=f"says that an epoch has 2 batches, and it has {how}"):
        content(batches)


def test_a_sampler_that_is_made_on_a_spare_waits_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedSampler, "__init__", DistributedSampler.__init__)  # put back afterwards
    monkeypatch.setattr(DistributedSampler, "rank", None, raising=False)
    asked = []
    have_samplers_wait(lambda: asked.append("rank") or 1)
    late = DistributedSampler(Numbers(6), 2, shuffle=False)
    told = DistributedSampler(Numbers(6), 2, 0, shuffle=False)
    assert len(late) == 3
    assert asked == []
    assert list(late) == [1, 3, 5]
    assert list(told) == [0, 2, 4]
    assert asked == ["rank"]


def test_random_samplers_that_share_a_generator() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        sampler = RandomSampler(Numbers(9), generator=generator)
        return DataLoader(Numbers(9), batch_size=2, sampler=sampler, generator=generator)

    assert content(of(make())) == plain(make())
