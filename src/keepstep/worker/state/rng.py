"""Random numbers as a function of (seed, rank, step), so that a step computed again draws the same ones."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (CPU and CUDA) for one step of one rank.

    The three numbers are hashed (BLAKE2b), so that neighbouring steps and ranks share no stream.
    """
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number)
