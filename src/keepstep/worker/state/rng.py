"""Random numbers as a function of (seed, rank, step), so that a repeated step draws the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from keepstep.errors import ConfigurationError

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A generator of the script's own."""


def seed_start_up(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (CPU and accelerators) for what a script does before its first
    step.

    It is the same on all ranks, so that each builds the same model.
    """
    number = _number(f"{seed}/start-up")
    _seed_host(number)
    torch.manual_seed(number)  # also those of devices that the script opens later


def seed_step(seed: int, rank: int, step: int | str) -> None:
    """Seeds the same generators for one step of one rank, or for a named point of its training."""
    number = _number(f"{seed}/{rank}/{step}")
    _seed_host(number)
    _seed_torch(number)


def check_generator(name: str, generator: Generator) -> None:
    """Checks that a generator of the script's own can be seeded.

    Raises:
        ConfigurationError: it draws from the operating system.
    """
    if isinstance(generator, random.SystemRandom):
        raise ConfigurationError(
            f"protect({name}=SystemRandom): it cannot be seeded, so a repeated step would draw other numbers; use "
            "random.Random"
        )


def seed_generators(generators: Mapping[str, Generator], seed: int, rank: int, step: int | str) -> None:
    """Seeds generators of the script's own for one step of one rank, each by its name, with unrelated numbers."""
    for name, generator in generators.items():
        number = _number(f"{seed}/{rank}/{step}/{name}")
        match generator:
            case torch.Generator():
                generator.manual_seed(number)
            case random.Random():
                generator.seed(number)
            case np.random.Generator():
                bits = generator.bit_generator
                bits.state = type(bits)(number).state
            case np.random.RandomState():
                bits = generator._bit_generator
                bits.state = type(bits)(number).state
                generator.set_state(generator.get_state(legacy=False) | {"has_gauss": 0, "gauss": 0.0})


def _seed_torch(number: int) -> None:
    """Seeds the CPU and the available accelerator, as `torch.manual_seed` does.

    Torch's function seeds every kind of accelerator that it was built for, also where there is none: for an
    uninitialized one it queues the seed with a formatted stack trace. With torch's CUDA build on a machine without a
    GPU that took 0.2 to 2 ms of each step (torch 2.15, 2 cores, November 2026).
    """
    torch.default_generator.manual_seed(number)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed  # MPS has one device
        seed_all(number)


def _number(what: str) -> int:
    """A seed from a BLAKE2b hash, so that adjacent seeds, steps and ranks get unrelated random numbers."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little") >> 1


def _seed_host(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
