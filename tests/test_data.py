"""keepstep.data: the batch of any step, whatever was read before it."""

import ctypes
import itertools
import os
import random
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from keepstep.data import StepSampler, permute
from keepstep.data.reader import BatchReader, Request
from keepstep.errors import ConfigurationError, PeerLost

HUGE = 10**12

# Python 3.12 and later warn of a fork beside other threads; torch has some, and its loader copes with them.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@st.composite
def samplers(draw: st.DrawFn, max_samples: int = 400) -> StepSampler:
    batch_size, world_size = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    num_samples = draw(st.integers(batch_size * world_size, max_samples))
    return StepSampler(num_samples, batch_size, world_size, shuffle=draw(st.booleans()), seed=draw(st.integers()))


def global_batch(sampler: StepSampler, step: int) -> list[int]:
    return [int(i) for rank in range(sampler.world_size) for i in sampler.indices(step, rank)]


# ---- The permutation ------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 10**9))
def test_permutation_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(range(n), n, seed=seed, epoch=epoch).tolist()) == [*range(n)]


@pytest.mark.parametrize("n", range(1, 70))
def test_permutation_of_every_small_range_is_a_bijection(n: int) -> None:
    for epoch in range(5):
        assert sorted(permute(range(n), n, epoch=epoch).tolist()) == [*range(n)]


@given(n=st.integers(2**40, 2**63 - 1), seed=st.integers(), data=st.data())
def test_permutation_of_a_huge_range_stays_inside_and_keeps_apart(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    values = permute([*positions, n - 1], n, seed=seed).tolist()
    assert all(0 <= value < n for value in values)
    assert len({*values}) == len({*positions, n - 1})


def test_permutation_does_not_change_between_versions() -> None:
    # A job may be resumed with a newer keepstep: these numbers must stay.
    assert permute(range(10), 10, seed=1, epoch=2).tolist() == [1, 5, 2, 9, 0, 4, 8, 3, 6, 7]
    assert permute([0, 1, HUGE - 1], HUGE, seed=-5).tolist() == [598754013901, 72875932022, 34403301282]


def test_permutation_keeps_the_shape_and_does_not_write_to_its_input() -> None:
    positions = np.arange(12).reshape(3, 4)
    values = permute(positions, 12)
    assert (values.shape, values.dtype) == ((3, 4), np.int64)
    assert (positions == np.arange(12).reshape(3, 4)).all()
    assert permute(7, 12).shape == ()
    assert permute([], 12).shape == (0,)


@pytest.mark.parametrize("n", [10, 97])
def test_every_position_sees_every_sample_about_equally_often(n: int) -> None:
    num_epochs = 4000
    seen = np.stack([permute(range(n), n, epoch=epoch) for epoch in range(num_epochs)])
    counts = np.stack([np.bincount(column, minlength=n) for column in seen.T])
    expected = num_epochs / n
    # Chi-square over the whole table: (n - 1)² degrees of freedom, standard deviation sqrt(2) (n - 1).
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (n - 1) ** 2) < 6 * 2**0.5 * (n - 1)


@pytest.mark.parametrize(("positions", "misplaced"), [([-1], -1), ([10], 10), ([0, 5, 11], 11), (-2, -2)])
def test_permutation_refuses_positions_outside(positions: npt.ArrayLike, misplaced: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"positions must lie in \[0, 10\), and {misplaced} does not"):
        permute(positions, 10)


# ---- The sampler ----------------------------------------------------------------------------------------------------


@given(sampler=samplers(), epoch=st.integers(0, 10**6))
def test_an_epoch_repeats_no_sample_and_drops_less_than_a_global_batch(sampler: StepSampler, epoch: int) -> None:
    first = epoch * sampler.steps_per_epoch
    steps = range(first, first + sampler.steps_per_epoch)
    seen = [i for step in steps for i in global_batch(sampler, step)]
    assert len(seen) == len({*seen}) == sampler.steps_per_epoch * sampler.world_size * sampler.batch_size
    assert {*seen} <= {*range(sampler.num_samples)}
    assert sampler.num_samples - len(seen) < sampler.world_size * sampler.batch_size
    assert {sampler.epoch(step) for step in steps} == {epoch}
    assert sampler.epoch(first + sampler.steps_per_epoch) == epoch + 1


@given(sampler=samplers(), step=st.integers(0, 10**9))
def test_ranks_of_a_step_do_not_overlap_and_batches_are_full(sampler: StepSampler, step: int) -> None:
    batches = [sampler.indices(step, rank) for rank in range(sampler.world_size)]
    assert [batch.shape for batch in batches] == [(sampler.batch_size,)] * sampler.world_size
    assert len({*global_batch(sampler, step)}) == sampler.world_size * sampler.batch_size


@given(
    sampler=samplers(), step=st.integers(0, 10**9), asked=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 4)))
)
def test_no_answer_depends_on_what_was_asked_before(
    sampler: StepSampler, step: int, asked: list[tuple[int, int]]
) -> None:
    fresh = StepSampler(
        sampler.num_samples, sampler.batch_size, sampler.world_size, shuffle=sampler.shuffle, seed=sampler.seed
    )
    for other_step, rank in asked:
        batch = sampler.indices(other_step, rank % sampler.world_size)
        batch[:] = -1  # the caller owns it
    assert global_batch(sampler, step) == global_batch(fresh, step)


def test_a_step_is_the_same_samples_however_the_ranks_share_them() -> None:
    one = StepSampler(1000, 12, 1, seed=3)
    four = StepSampler(1000, 3, 4, seed=3)
    assert all(global_batch(one, step) == global_batch(four, step) for step in range(200))


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    sampler = StepSampler(10, 2, 2, shuffle=False)
    assert [global_batch(sampler, step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_an_epoch_is_iterated_by_rank(group_of_two: int) -> None:
    sampler = StepSampler(10, 2, 2, seed=1)
    assert len(sampler) == sampler.steps_per_epoch == 2
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert [*sampler] == [sampler.indices(2 * epoch + place, group_of_two).tolist() for place in range(2)]
    alone = StepSampler(10, 2, 1, shuffle=False)
    assert [*alone] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.fixture
def group_of_two() -> Iterator[int]:
    """The rank of this process in a group of two that does not communicate."""
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield 1
    torch.distributed.destroy_process_group()


def test_it_is_not_iterated_where_the_rank_does_not_tell_the_samples() -> None:
    with pytest.raises(ConfigurationError, match=r"among 2, and the job has 1 ranks: read .* session\.batches\(\)"):
        next(iter(StepSampler(10, 2, 2)))


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [global_batch(StepSampler(64, 64, 1, seed=seed), epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_trillion_samples_take_no_memory() -> None:
    sampler = StepSampler(HUGE, 32, 8)
    tracemalloc.start()
    try:
        far = sampler.indices(3 * sampler.steps_per_epoch - 1, 7)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sampler.epoch(3 * sampler.steps_per_epoch - 1) == 2
    assert len({*far.tolist()}) == 32
    assert far.max() > HUGE // 2
    assert peak_bytes < 2**20


def test_numpy_numbers_are_numbers() -> None:
    sampler = StepSampler(np.int64(100), np.int32(4), np.int64(2))  # type: ignore[arg-type]  # as users call it
    assert sampler.indices(np.int64(3), np.int64(1)).tolist() == StepSampler(100, 4, 2).indices(3, 1).tolist()  # type: ignore[arg-type]  # as users call it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "dataset is empty"),
        ((-3, 1, 1), "num_samples must be from 0"),
        ((2**63, 1, 1), "num_samples must be from 0"),
        ((10, 0, 1), "batch_size must be at least 1"),
        ((10, 1, 0), "world_size must be at least 1"),
        ((10, 2.5, 1), "batch_size must be a whole number, not 2.5"),
        ((10, 4, 3), "takes 12 samples .* has 10: lower batch_size to at most 3"),
    ],
)
def test_bad_sizes_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StepSampler(*arguments)


@pytest.mark.parametrize(
    ("step", "rank", "message"),
    [(-1, 0, "step must be at least 0, not -1"), (0, 2, "rank must be from 0 to 1, not 2"), (0, -1, "rank must be")],
)
def test_bad_questions_are_refused(step: int, rank: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StepSampler(10, 2, 2).indices(step, rank)


# ---- The reader -----------------------------------------------------------------------------------------------------


class Squares(Dataset[Any]):
    """Each sample: its index, its square, and noise from all three generators that augmentations draw from."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        noise = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])
        return {"index": index, "square": torch.tensor(index**2), "noise": noise, "process": os.getpid()}


class Faulty(Squares):
    """Sample 7 cannot be read, sample 8 hangs, sample 9 takes its process down."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise ValueError("sample 7 is damaged")
        if index == 8:
            signal.pause()
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Batched(Squares):
    """Reads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-i for i in indices]


class DeathSignal(Dataset[int]):
    """Tells which signal its process gets when its parent dies."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        value = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(value))  # PR_GET_PDEATHSIG
        return value.value


class Reading:
    """Reads batches by step and rank, in the order of a sampler. The loader gets the options."""

    def __init__(self, dataset: Dataset[Any], sampler: StepSampler, **options: Any) -> None:
        self.sampler = sampler
        self.reader = BatchReader(DataLoader(dataset, batch_sampler=sampler, **options), seed=5)
        self.close = self.reader.close

    def batch(self, step: int, rank: int = 0) -> Any:
        def requests() -> Iterator[Request]:
            return (Request(n, rank, self.sampler.indices(n, rank).tolist()) for n in itertools.count(step))

        return self.reader.read(step, rank, requests)


def squares(num_workers: int = 0) -> Reading:
    return Reading(Squares(100), StepSampler(100, 4, 2, seed=5), num_workers=num_workers)


def one_by_one(dataset: Squares, **options: Any) -> Reading:
    return Reading(dataset, StepSampler(len(dataset), 1, 1, shuffle=False), **options)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(a[name], b[name]) for name in ("index", "square", "noise"))


@pytest.fixture
def prefetching() -> Iterator[Reading]:
    with closing(squares(num_workers=2)) as reading:
        yield reading


def test_noise_is_a_function_of_step_and_rank_and_leaves_the_generators_alone() -> None:
    reading = squares()
    first = reading.batch(3, 1)
    expected = [draw() for draw in seeded_generators()]
    draws = seeded_generators()
    again = reading.batch(3, 1)
    assert_equal(first, again)
    assert [draw() for draw in draws] == expected
    assert not torch.equal(first["noise"], reading.batch(3, 0)["noise"])
    assert not torch.equal(first["noise"], reading.batch(4, 1)["noise"])


def seeded_generators():  # type: ignore[no-untyped-def]  # three callables
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return random.random, np.random.random, lambda: float(torch.rand(()))


@forks
def test_loader_workers_seek_both_ways_and_equal_inline(prefetching: Reading) -> None:
    inline = squares()
    # In order; across an epoch; back (a rollback); the same again; far ahead; another rank (a takeover).
    asked = [(0, 0), (1, 0), (2, 0), (11, 0), (12, 0), (13, 0), (12, 0), (12, 0), (10**9, 0), (4, 1), (5, 1)]
    processes = set()
    for step, rank in asked:
        batch = prefetching.batch(step, rank)
        assert_equal(batch, inline.batch(step, rank))
        assert batch["index"].tolist() == inline.sampler.indices(step, rank).tolist()
        processes |= {*batch["process"].tolist()}
    assert os.getpid() not in processes
    assert len(processes) == 2  # the same two, whatever was asked


@forks
def test_loader_workers_leave_the_random_numbers_of_training_alone(prefetching: Reading) -> None:
    expected = [draw() for draw in seeded_generators()]
    draws = seeded_generators()
    for step in (0, 1, 9, 3):
        prefetching.batch(step)
    assert [draw() for draw in draws] == expected


@forks
def test_closing_ends_the_loader_workers_and_the_next_batch_starts_others(prefetching: Reading) -> None:
    before = {int(pid) for step in range(2) for pid in prefetching.batch(step)["process"]}
    prefetching.close()
    assert not any(is_alive(pid) for pid in before)
    prefetching.close()
    after = {int(pid) for step in range(2, 4) for pid in prefetching.batch(step)["process"]}
    assert not before & after


@forks
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
def test_the_kernel_ends_loader_workers_with_their_rank() -> None:
    sampler = StepSampler(1, 1, 1)
    with closing(Reading(DeathSignal(), sampler, num_workers=1)) as reading:
        assert reading.batch(0).tolist() == [signal.SIGKILL]
    assert Reading(DeathSignal(), sampler).batch(0).tolist() == [0]  # not the rank itself


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is not waited for yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@forks
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_comes_through_and_the_reader_goes_on(num_workers: int) -> None:
    with closing(one_by_one(Faulty(8), num_workers=num_workers)) as reading:
        reading.batch(6)
        with pytest.raises(ValueError, match="sample 7 is damaged"):
            reading.batch(7)
        assert reading.batch(3)["index"].tolist() == [3]


@forks
def test_a_loader_worker_that_hangs_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # how long closing waits for it
    with closing(one_by_one(Faulty(9), num_workers=1, timeout=0.5, prefetch_factor=1)) as reading:
        with pytest.raises(PeerLost, match=r"rank 0 did not answer within 0\.5 s at batch 8"):
            reading.batch(8)
        assert reading.batch(3)["index"].tolist() == [3]


@forks
def test_a_loader_worker_that_dies_is_reported() -> None:
    reading = one_by_one(Faulty(10), num_workers=1, prefetch_factor=1)
    with closing(reading), pytest.raises(PeerLost, match=r"rank 0 died .* at batch 9"):
        reading.batch(9)


def test_a_dataset_may_read_whole_batches_and_the_batch_may_be_collated_otherwise() -> None:
    reading = Reading(Batched(10), StepSampler(10, 3, 1, shuffle=False), collate_fn=tuple)
    assert reading.batch(1) == (-3, -4, -5)
