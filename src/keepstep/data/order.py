"""Which samples a rank reads at a step, computed in constant time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import numpy as np
import numpy.typing as npt
from torch import distributed
from torch.utils.data import Sampler

from keepstep.data.numbers import digest, whole
from keepstep.errors import ConfigurationError

Indices = npt.NDArray[np.int64]

# Four rounds are the least with a proof (Luby & Rackoff 1988), and the proof is weak for small domains. NIST's FF1
# takes ten against an attacker, and the order of a training set has none. Eight keys are one BLAKE2b digest.
NUM_ROUNDS = 8


def permute(positions: npt.ArrayLike, num_samples: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    """Look up positions in a pseudo-random permutation of ``range(num_samples)`` that is never built.

    The permutation is a balanced Feistel network over pairs of numbers below ``ceil(sqrt(num_samples))``, applied again
    while the result lies outside the range (cycle walking): methods 3 and 2 of J. Black and P. Rogaway, "Ciphers
    with Arbitrary Finite Domains", CT-RSA 2002. Its round function is the mixer of SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014) and its keys are a BLAKE2b digest of (seed, epoch): fit for training, not for secrecy. The
    result does not depend on the machine or on the version of a library.

    Args:
        positions: Whole numbers in [0, num_samples), in any shape.
        num_samples: The size of the range, 1 to 2**63 - 1.
        seed: Any whole number.
        epoch: Any whole number; each pair (seed, epoch) has its own permutation.

    Returns:
        A new int64 array of the shape of `positions`.

    Raises:
        ConfigurationError: `num_samples` or a position is out of range.
    """
    num_samples = whole("num_samples", num_samples, 1, 2**63 - 1)
    given = np.asarray(positions, dtype=np.int64)
    if (misplaced := given[(given < 0) | (given >= num_samples)]).size:
        raise ConfigurationError(f"positions must lie in [0, {num_samples}), and {misplaced[0]} does not")
    keys = _round_keys(seed, epoch)
    # The square is at most 2 * sqrt(num_samples) larger than the range, so a second turn is rare.
    side = np.uint64(isqrt(num_samples - 1) + 1)
    values = _encipher(given.ravel().astype(np.uint64), side, keys)
    while (outside := values >= num_samples).any():
        values[outside] = _encipher(values[outside], side, keys)
    return values.astype(np.int64).reshape(given.shape)


def _encipher(values: npt.NDArray[np.uint64], side: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permute range(side ** 2); a round is undone by subtracting what it added, so it is one to one."""
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _mix(right + key) % side) % side
    return left * side + right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Stafford's variant 13), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digest("permutation", seed, epoch), dtype="<u8", count=NUM_ROUNDS).astype(np.uint64)


class StepSampler(Sampler[list[int]]):
    """A batch sampler whose batches depend only on the step and the rank, so that any of them is found at once.

    Give it to a ``DataLoader`` as ``batch_sampler`` and read that with `keepstep.Session.batches`, which asks for the
    batches of its own ``data_rank``. Or ask for `indices` and compute the batch. The sampler itself needs no rank, so
    a waiting spare can create it.

    The result depends on the world size. A job that continues with fewer ranks reads from then on the samples that a
    job of that size would read at the same step.

    Args:
        num_samples: The size of the dataset, 1 to 2**63 - 1.
        batch_size: Samples per rank and step.
        world_size: Number of ranks that differ in their samples: ``session.data_world_size``.
        shuffle: Whether each epoch is permuted; otherwise every epoch is 0, 1, 2, ...
        seed: Any whole number, the same on all ranks.

    Raises:
        ConfigurationError: a number is out of range, or one global batch is larger than the dataset.
    """

    def __init__(
        self, num_samples: int, batch_size: int, world_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self.num_samples = whole("num_samples", num_samples, 0, 2**63 - 1)
        if self.num_samples == 0:
            raise ConfigurationError("the dataset is empty: there is nothing to draw a batch from")
        self.batch_size = whole("batch_size", batch_size, 1)
        self.world_size = whole("world_size", world_size, 1)
        self.shuffle = shuffle
        self.seed = whole("seed", seed)
        if self.global_batch_size > self.num_samples:
            raise ConfigurationError(
                f"a global batch takes {self.global_batch_size} samples ({self.world_size} ranks × {self.batch_size}), "
                f"the dataset has {self.num_samples}: lower batch_size to at most "
                f"{self.num_samples // self.world_size}, or take fewer ranks"
            )
        self._epoch = 0

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together read in one step."""
        return self.world_size * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in each epoch, at least 1."""
        return self.num_samples // self.global_batch_size

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0.

        Raises:
            ConfigurationError: `step` is negative.
        """
        return whole("step", step, 0) // self.steps_per_epoch

    def indices(self, step: int, rank: int) -> Indices:
        """The samples of one rank at one step.

        Args:
            step: From 0, without an upper end.
            rank: In [0, world_size): ``session.data_rank``.

        Returns:
            A new int64 array of shape (batch_size,), each value in [0, num_samples).

        Raises:
            ConfigurationError: `step` is negative, or `rank` out of range.
        """
        epoch = self.epoch(step)
        rank = whole("rank", rank, 0, self.world_size - 1)
        first = (step % self.steps_per_epoch * self.world_size + rank) * self.batch_size
        positions = np.arange(first, first + self.batch_size, dtype=np.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.num_samples, seed=self.seed, epoch=epoch)

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch that the next iteration yields, as `torch.utils.data.DistributedSampler.set_epoch`.

        Raises:
            ConfigurationError: `epoch` is negative.
        """
        self._epoch = whole("epoch", epoch, 0)

    def __len__(self) -> int:
        """Batches of a rank in each epoch: `steps_per_epoch`."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this process's batches of the epoch, for a loop over the ``DataLoader`` itself.

        Raises:
            ConfigurationError: some of the job's ranks, but not all, share their samples, so its rank does not tell
                which samples are this process's.
        """
        num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if self.world_size not in (1, num_ranks):
            raise ConfigurationError(
                f"StepSampler shares out the samples among {self.world_size}, and the job has {num_ranks} ranks: read "
                "the loader with session.batches(), or compute the batch from indices(step, session.data_rank)"
            )
        rank = distributed.get_rank() if self.world_size > 1 else 0
        first = self._epoch * self.steps_per_epoch
        for step in range(first, first + self.steps_per_epoch):
            yield self.indices(step, rank).tolist()
