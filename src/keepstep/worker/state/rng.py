"""Random numbers as a function of (seed, rank, step), so that a step computed again draws the same ones."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_start_up(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (CPU and CUDA) for what a script does before its first step.

    It is the same on all ranks, so that each builds the same model.
    """
    _seed_all(f"{seed}/start-up")


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seeds the same generators for one step of one rank."""
    _seed_all(f"{seed}/{rank}/{step}")


def _seed_all(what: str) -> None:
    """From a hash (BLAKE2b), so that neighbouring seeds, steps and ranks share no stream."""
    digest = hashlib.blake2b(what.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number)
