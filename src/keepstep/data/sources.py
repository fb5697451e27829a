"""Random number generators of Python, NumPy and torch behind one interface: get and set the state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomSource(NamedTuple):
    """A generator."""

    get: Callable[[], Any]
    """Returns a copy of the state."""
    put: Callable[[Any], object]
    """Sets the state."""


# The process's CPU generators, which datasets and samplers use if they have no generator of their own.
PROCESS_SOURCES = (
    RandomSource(random.getstate, random.setstate),
    RandomSource(np.random.get_state, np.random.set_state),
    RandomSource(torch.get_rng_state, torch.set_rng_state),
)


def seed_process(key: bytes) -> None:
    """Seeds the `PROCESS_SOURCES`.

    Args:
        key: at least 36 bytes.
    """
    numbers = np.frombuffer(key, dtype="<u4")
    random.seed(key[:16])
    np.random.seed(numbers[4:8])
    # Not torch.manual_seed(), which would seed the accelerators, too.
    torch.default_generator.manual_seed(int(numbers[8]))


def source_of(thing: object) -> RandomSource | None:
    """Returns the interface to a generator of Python, NumPy or torch; None if ``thing`` is no generator."""
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
