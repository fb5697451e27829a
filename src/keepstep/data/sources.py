"""Generators of random numbers of every kind: their states, taken and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomSource(NamedTuple):
    """A generator."""

    get: Callable[[], Any]
    """Gives a copy of its state."""
    put: Callable[[Any], object]
    """Puts a state back."""


# The three that datasets and samplers draw from on the CPU, if they have none of their own.
PROCESS_SOURCES = (
    RandomSource(random.getstate, random.setstate),
    RandomSource(np.random.get_state, np.random.set_state),
    RandomSource(torch.get_rng_state, torch.set_rng_state),
)


def seed_process(key: bytes) -> None:
    """Seeds these three from at least 36 bytes."""
    numbers = np.frombuffer(key, dtype="<u4")
    random.seed(key[:16])
    np.random.seed(numbers[4:8])
    # Not torch.manual_seed, which would seed the accelerators too.
    torch.default_generator.manual_seed(int(numbers[8]))


def source_of(thing: object) -> RandomSource | None:
    """That of a generator of Python, NumPy or torch; None if it is something else."""
    match thing:
        case torch.Generator():
            return RandomSource(thing.get_state, thing.set_state)
        case random.Random():
            return RandomSource(thing.getstate, thing.setstate)
        case np.random.RandomState():
            return RandomSource(thing.get_state, thing.set_state)
        case np.random.Generator(bit_generator=bits):
            return RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state))
        case _:
            return None
