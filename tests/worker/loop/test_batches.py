"""The order of a torch loader, found again from any step on, and the batches of the steps."""

import copy
import itertools
import os
import pickle
import random
import types
from collections.abc import Iterator
from pathlib import Path
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
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from keepstep.data import StepSampler
from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.batches import Batches
from keepstep.worker.loop.late_rank import have_samplers_wait
from keepstep.worker.loop.reading import Reading, check_replicas
from keepstep.worker.loop.step import Step


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


def of(
    loader: Any, steps: Any = None, *, epochs: int = 3, accumulate: int = 1, updates: int = 1, seed: int = 5
) -> Batches:
    """Batches of a script that is handed these steps, or all in their order."""

    def hand_out(num_steps: int) -> Iterator[Any]:
        controller: Any = types.SimpleNamespace(is_interruption=lambda error: False)
        return iter([Step(controller, index, 0, False) for index in (range(num_steps) if steps is None else steps)])

    return Batches(Reading(loader, epochs, accumulate, seed, lambda: 1, updates=updates), hand_out)


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
        inner: Any = loader.batch_sampler
        while hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        inner = getattr(inner, "sampler", loader.sampler)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)
        found += [batch.tolist() for batch in loader]
    return found


class Wrapping:
    """A batch sampler around another one, as accelerate's ``BatchSamplerShard``."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def wrapped(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(23), batch_sampler=Wrapping(BatchSampler(sampler, 4, drop_last=False)))


class Both(Sampler[int]):
    """Two samplers, one after the other."""

    def __init__(self, *samplers: Any) -> None:
        self.samplers = samplers

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*self.samplers)

    def __len__(self) -> int:
        return sum(map(len, self.samplers))


class Own(Sampler[int]):
    """Draws an epoch at once from a generator that it is given; by default from NumPy's own."""

    def __init__(self, rng: Any = None, draw: Any = lambda rng: rng.permutation(6).tolist()) -> None:
        self.rng, self.draw = np.random.default_rng(3) if rng is None else rng, draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.rng))

    def __len__(self) -> int:
        return 6


class Reversing(DistributedSampler[int]):
    """Has an order of its own, of rank and epoch."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.rank, len(self.dataset), self.num_replicas))
        return iter(order[::-1] if self.epoch % 2 else order)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))


def eager(num_workers: int = 0) -> DataLoader[Any]:
    """A sampler that draws when it is asked for an iterator, from the generator that the loader takes a seed from."""
    generator = torch.Generator().manual_seed(4)
    sampler = Own(generator, lambda rng: torch.randperm(6, generator=rng).tolist())
    context = "fork" if num_workers else None
    options: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": context, "generator": generator}
    return DataLoader(Numbers(6), batch_size=None, sampler=sampler, **options)


def drawn(*arguments: Any, **options: Any) -> RandomSampler:
    return RandomSampler(Numbers(11), *arguments, generator=torch.Generator().manual_seed(8), **options)


def weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    sampler = WeightedRandomSampler(torch.arange(1.0, 12.0), 9, generator=generator)
    return DataLoader(Numbers(11), batch_sampler=BatchSampler(sampler, 2, drop_last=False))


def first(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return batch[0]


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
    "weighted, a few": lambda: DataLoader(
        Numbers(11), 2, sampler=SubsetRandomSampler([1, 3, 7, 9], generator=torch.Generator().manual_seed(2))
    ),
    "drawn in pieces": lambda: DataLoader(Numbers(11), batch_size=3, sampler=drawn(replacement=True, num_samples=70)),
    "inside another one": lambda: wrapped(DistributedSampler(Numbers(23), 2, 1, seed=3)),
    "inside another one, a generator": lambda: wrapped(drawn()),
    "two generators": lambda: DataLoader(Numbers(11), batch_size=3, sampler=Both(drawn(), drawn(num_samples=3))),
    "a subclass": lambda: DataLoader(Numbers(11), batch_size=2, sampler=Reversing(Numbers(11), 2, 1)),
    "NumPy's generator": lambda: DataLoader(Numbers(6), batch_size=4, sampler=Own()),
    "NumPy's old generator": lambda: DataLoader(Numbers(6), batch_size=4, sampler=Own(np.random.RandomState(1))),
    "Python's generator": lambda: DataLoader(
        Numbers(6), batch_size=4, sampler=Own(random.Random(1), lambda rng: rng.sample(range(6), 6))
    ),
    "drawn at once": eager,
    "drawn at once, workers": lambda: eager(1),
    "by arrays": lambda: DataLoader(Numbers(11), batch_sampler=Wrapping([np.array([1, 2]), np.array([3])])),
    "many indices at once": lambda: DataLoader(
        TensorDataset(torch.arange(11)), batch_size=None, sampler=BatchSampler(drawn(), 4, False), collate_fn=first
    ),
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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch["x"].zero_(),
        lambda batch: batch["x"].data.zero_(),
        lambda batch: batch["x"].numpy().fill(0),
        lambda batch: batch["x"].set_(),
        lambda batch: batch.pop("x"),
        lambda batch: batch["more"].append(1),
        lambda batch: batch["more"][0].fill(0),
    ],
)
def test_a_step_that_is_repeated_has_the_same_batch_after_any_change_by_the_script(spoil: Any) -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        return {"x": torch.stack(samples), "more": [np.stack(samples), None, "text"]}

    found = []
    for _step, batch in of(DataLoader(Numbers(8), batch_size=2, collate_fn=collate), [1, 1, 2]):
        found.append(repr(batch))
        spoil(batch)
    assert found[0] == found[1] != found[2]


def test_a_plain_loop_in_between_changes_nothing() -> None:
    """The generator is drawn from in the middle of an epoch too, by both loops."""

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(11), batch_size=3, sampler=drawn(replacement=True, num_samples=70))

    loader, found, validated = make(), [], []
    for _step, batch in of(loader):
        found.append(batch.tolist())
        validated.append([each.tolist() for each in loader][:2])
    assert found == plain(make())
    assert validated[0] == found[:2]


def test_far_jumps_over_epochs_that_were_forgotten() -> None:
    found = content(of(with_generator(), epochs=40))
    jumps = [100, 3, 119, 0, 60, 4, 90, 1]
    assert content(of(with_generator(), jumps, epochs=40)) == [found[index] for index in jumps]


class Counting(Sampler[int]):
    """Counts its epochs itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from [(self.epoch + place) % 4 for place in range(4)]
        self.epoch += 1

    def __len__(self) -> int:
        return 4


class Reshuffling(Sampler[int]):
    """Shuffles what it shuffled before."""

    def __init__(self) -> None:
        self.indices = list(range(9))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize("sampler", [Counting(), Reshuffling()])
def test_a_sampler_whose_order_cannot_be_found_again_is_refused(sampler: Sampler[int]) -> None:
    batches = of(wrapped(sampler))
    with pytest.raises(ConfigurationError, match="gives another order when it is asked for the same epoch again"):
        content(batches)


class Worker(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Worker)
        if index == self.size:
            raise ValueError("a bad sample")
        return torch.tensor(os.getpid())


class Leaving(Exception):
    pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["end", "break", "body", "dataset"])
def test_loader_workers_stay_over_epochs_and_end_with_the_loop(how: str) -> None:
    sampler = [0, 1, 2, 8] if how == "dataset" else [0, 1, 2, 3]
    loader = DataLoader(Worker(8), 1, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    workers = set()
    try:
        for step, batch in of(loader):
            workers.add(batch.item())
            if step.index == 2 and how == "break":
                break
            if step.index == 2 and how == "body":
                raise Leaving
    except (Leaving, ValueError):
        pass
    (worker,) = workers
    assert not Path(f"/proc/{worker}").exists()


def test_pinned_without_workers() -> None:
    loader = DataLoader(Numbers(2), pin_memory=True)
    if torch.accelerator.is_available():
        assert all(batch.is_pinned() for _step, batch in of(loader))
    else:
        with pytest.warns(UserWarning, match="no accelerator is found"):
            assert content(of(loader, epochs=1)) == [[0], [1]]


def test_numbers_of_numpy_and_steps_longer_than_an_epoch() -> None:
    numbers: Any = np.int64(2), np.int64(7)
    loader = DataLoader(Numbers(3))
    batches = of(loader, epochs=numbers[0], accumulate=numbers[1])
    assert (len(batches), content(batches)) == (2, 2 * [[[0], [1], [2]]])


def test_ranks_that_read_the_same_samples_need_a_sampler_for_fewer_ranks() -> None:
    def loader(num_replicas: int) -> DataLoader[Any]:
        return wrapped(DistributedSampler(Numbers(8), num_replicas, 0))

    check_replicas(loader(2), 2, 4)
    check_replicas(loader(4), 4, 4)
    with pytest.raises(ConfigurationError, match="among all 4 ranks, and only 2 have samples of their own"):
        check_replicas(loader(4), 2, 4)

    check_replicas(computed(), 2, 4)
    with pytest.raises(ConfigurationError, match=r"the StepSampler .* among 2 ranks, and 4 have samples of their own"):
        check_replicas(computed(), 4, 4)


def computed() -> DataLoader[Any]:
    return DataLoader(Numbers(23), batch_sampler=StepSampler(23, 3, 2, seed=3))


def test_a_step_sampler_is_asked_for_the_batches_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no earlier ones, however many there are."""
    expected = [StepSampler(23, 3, 2, seed=3).indices(step, 1).tolist() for step in range(9)]
    assert content(of(computed())) == expected
    asked = []
    ask = StepSampler.indices

    def recorded(self: StepSampler, step: int, rank: int) -> Any:
        asked.append((step, rank))
        return ask(self, step, rank)

    monkeypatch.setattr(StepSampler, "indices", recorded)
    assert content(of(computed(), [7, 8, 2])) == [expected[step] for step in (7, 8, 2)]
    assert asked == [(7, 1), (8, 1), (2, 1)]


def test_a_subclass_of_a_step_sampler_has_the_last_word() -> None:
    class Doubled(StepSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return ([2 * index for index in batch] for batch in super().__iter__())

    loader = DataLoader(Numbers(12), batch_sampler=Doubled(6, 2, 1, shuffle=False))
    assert content(of(loader, epochs=2)) == 2 * [[0, 2], [4, 6], [8, 10]]


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


class Moving(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch + 1 for batch in super().__iter__())


class Unknown(SequentialSampler):
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        ([1, 2], {}, "give it a torch DataLoader"),
        (DataLoader(Stream()), {}, "IterableDataset, in which no batch can be found again"),
        (Moving(Numbers(3)), {}, "Moving changes what a DataLoader gives, by an __iter__ of its own"),
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


class Told(DistributedSampler[int]):
    """Has attributes of its own before, and its rank from elsewhere."""

    def __init__(self, dataset: Any) -> None:
        assert not hasattr(self, "rank")
        super().__init__(dataset, 2, shuffle=False)
        self.rank = 0


def test_a_sampler_that_is_made_on_a_spare_waits_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedSampler, "__init__", DistributedSampler.__init__)  # put back afterwards
    monkeypatch.setattr(DistributedSampler, "rank", None, raising=False)
    asked = []
    have_samplers_wait(lambda: asked.append("rank") or 1)
    late = DistributedSampler(Numbers(6), 2, shuffle=False)
    told = DistributedSampler(Numbers(6), 2, 0, shuffle=False)
    copies = [copy.deepcopy(late), pickle.loads(pickle.dumps(late))]
    assert len(late) == 3
    assert list(Told(Numbers(6))) == [0, 2, 4]
    assert asked == []
    assert list(late) == [1, 3, 5]
    assert list(told) == [0, 2, 4]
    assert asked == ["rank"]
    assert [list(each) for each in copies] == [[1, 3, 5], [1, 3, 5]]
    assert [batch.tolist() for batch in DataLoader(Numbers(6), sampler=copies[0])] == [[1], [3], [5]]


def test_random_samplers_that_share_a_generator() -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        sampler = RandomSampler(Numbers(9), generator=generator)
        return DataLoader(Numbers(9), batch_size=2, sampler=sampler, generator=generator)

    assert content(of(make())) == plain(make())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_steps_that_get_the_same_batch_get_it_as_it_was(accumulate: int, num_workers: int) -> None:
    """The script changes what it is given, and its step 3 is repeated."""
    loader = DataLoader(Numbers(8, draws=True), batch_size=2, num_workers=num_workers)
    once = content(of(loader, epochs=2, accumulate=accumulate))
    steps = [number for number in range(4 * len(once) // 2) for _ in range(1 + (number == 3))]
    found, updates = [], []
    for step, batch in of(loader, steps, epochs=2, accumulate=accumulate, updates=2):
        parts = batch if isinstance(batch, list) else [batch]
        found.append([part.tolist() for part in parts] if isinstance(batch, list) else batch.tolist())
        updates.append((step.update, step.is_epoch_end))
        for part in parts:
            part.data.mul_(2)
    assert found == [once[number // 2] for number in steps]
    per_epoch = len(once)
    assert updates == [(number % 2, number % per_epoch == per_epoch - 1) for number in steps]
