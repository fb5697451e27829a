"""Random numbers as a function of seed, rank and step."""

import random
import types
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from keepstep.errors import ConfigurationError
from keepstep.worker.state.rng import Generator, check_generator, seed_generators, seed_start_up, seed_step


def drawn(seed: int, rank: int, step: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """What Python, NumPy and torch draw after seeding."""
    seed_step(seed, rank, step)
    return (
        tuple(random.random() for _ in range(3)),
        tuple(np.random.random(3).tolist()),
        tuple(torch.rand(3, dtype=torch.float64).tolist()),
    )


@pytest.fixture(autouse=True)
def _restore_generators() -> None:
    """Seeding is global: later tests shall not draw what these left."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (3, 17), (1023, 10**9)])
def test_the_same_triple_draws_the_same(rank: int, step: int, seed: int) -> None:
    first = drawn(seed, rank, step)
    drawn(seed + 1, rank + 1, step + 1)
    torch.rand(100)
    assert drawn(seed, rank, step) == first


def test_neighbours_share_no_stream(seed: int) -> None:
    """Not only the first numbers: no number of one is a number of another."""
    triples = list(product((seed, seed + 1), range(4), range(6)))
    for source in range(3):
        numbers = [number for triple in triples for number in drawn(*triple)[source]]
        assert len(set(numbers)) == len(numbers)


def test_digits_that_move_between_the_numbers_matter() -> None:
    assert len({drawn(*triple) for triple in ((1, 11, 1), (11, 1, 1), (1, 1, 11), (111, 1, 1), (1, 1, 1))}) == 5


def test_every_generator_is_seeded_on_its_own() -> None:
    python, numpy, torchs = drawn(1, 2, 3)
    assert len({*python, *numpy, *torchs}) == 9


@pytest.mark.parametrize("number", [0, -1, 2**70, -(2**70)])
def test_any_whole_number_may_be_a_seed(number: int) -> None:
    assert drawn(number, 0, 0) == drawn(number, 0, 0) != drawn(number + 1, 0, 0)


def test_dropout_of_a_step_computed_again_is_the_same() -> None:
    layer = torch.nn.Dropout(0.5)
    masks = []
    for step in (4, 5, 4):
        seed_step(0, 1, step)
        masks.append(layer(torch.ones(64)))
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_the_start_up_has_numbers_of_its_own(seed: int) -> None:
    seed_start_up(seed)
    first = random.random(), np.random.random(), torch.rand(1).item()
    seed_start_up(seed)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == first
    assert drawn(seed, 0, 0)[0][0] != first[0]


def test_a_step_draws_from_torch_what_it_draws_after_manual_seed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every generator of an accelerator is seeded with the number that torch's own function would give it."""
    numbers: list[int] = []
    module = types.SimpleNamespace(manual_seed_all=numbers.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    seed_step(seed, 1, 2)
    drawn_after = torch.rand(3)
    monkeypatch.undo()
    torch.manual_seed(numbers.pop())
    assert torch.equal(drawn_after, torch.rand(3))
    assert not numbers


def test_a_step_seeds_no_accelerator_that_is_not_there(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Torch, built for one, would queue each seed for later with a formatted stack trace."""
    queued: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", queued.append)
    seed_step(seed, 1, 2)
    assert not queued


GENERATORS: dict[str, Callable[[], tuple[Generator, Callable[[], float]]]] = {
    "torch": lambda: (g := torch.Generator(), lambda: float(torch.rand(1, generator=g))),
    "numpy": lambda: (g := np.random.default_rng(), lambda: float(g.random())),
    "numpy's Philox": lambda: (g := np.random.Generator(np.random.Philox()), lambda: float(g.normal())),
    "RandomState": lambda: (g := np.random.RandomState(), lambda: float(g.normal())),
    "RandomState of PCG64": lambda: (g := np.random.RandomState(np.random.PCG64()), lambda: float(g.normal())),
    "python": lambda: (g := random.Random(), g.gauss),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_the_scripts_own_draw_the_same_in_a_repeated_step(kind: str, seed: int) -> None:
    """Also half of a pair of normal numbers that a generator has kept for the next call."""
    one, draw = GENERATORS[kind]()
    other, draw_other = GENERATORS[kind]()
    draw()
    drawn = []
    for name, rank, step in [("mine", 0, 3), ("mine", 0, 4), ("mine", 1, 3), ("yours", 0, 3)]:
        for each, it in ((one, draw), (other, draw_other)):
            seed_generators({name: each}, seed, rank, step)
            drawn.append([it() for _ in range(3)])
    assert drawn[::2] == drawn[1::2], "the state of a generator of another process does not matter"
    assert len({number for numbers in drawn for number in numbers}) == 12


def test_numbers_of_the_operating_system_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"protect\(noise=SystemRandom\): it cannot be seeded"):
        check_generator("noise", random.SystemRandom())
