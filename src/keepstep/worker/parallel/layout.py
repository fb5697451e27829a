"""The interface of an adapter: what a form of parallelism adds to a step and to a restore.

There is one adapter for each form of parallelism, in a file next to this one. It knows which part of each tensor its
rank holds, and prepares a step so that it can be undone and repeated. A model may need several at once (pipeline stages
that are fully sharded): `keepstep.worker.parallel.choose` finds and composes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import xxhash

from keepstep.weights.memory.blocks import NamedBlock, block_of


def shard_of(blocks: Iterable[NamedBlock], label: str = "") -> str:
    """Returns the name of a shard: a digest of its blocks' names, dtypes and positions, but not of their values.

    Args:
        blocks: the blocks that a rank holds.
        label: ``protect(shard=...)``: distinguishes shards whose blocks are alike.
    """
    digest = xxhash.xxh3_64(label.encode())
    for block in blocks:
        digest.update(f"{block.names} {block.dtype} {block.whole} {block.held.box}\n".encode())
    return digest.hexdigest()


class ParallelLayout(Protocol):
    """One rank's adapter. The training thread calls all methods."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may hold different parts. If not, all ranks must begin with the same state."""
        ...

    def at_rest(self) -> None:
        """Makes the modules show the parameters that the optimizer trains. Called before the first step."""
        ...

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """Returns the blocks that this rank holds of named tensors: parameters, buffers or optimizer state."""
        ...

    def hand_out(self) -> None:
        """Records what `undo` restores, when a step is yielded. The script's code before the step comes after it."""
        ...

    def begin_step(self) -> None:
        """Makes all ranks begin a step in the same way."""
        ...

    def before_barrier(self) -> None:
        """Shares all else that must be equal on all ranks before the update. Called when the gradients are complete."""
        ...

    def undo(self, *, in_backward: bool) -> None:
        """Undoes what forward and backward of a step have done to the wrappers. Called before its update only.

        Args:
            in_backward: whether the step was interrupted in its backward.
        """
        ...

    def new_generation(self) -> None:
        """Prepares the first step of a generation. All its ranks, replacements among them, begin it together."""
        ...

    def restored(self) -> None:
        """Updates what depends on the state, such as views of gradients, after the state was restored."""
        ...


class Replicated:
    """For a model without wrappers: every rank holds every tensor in full. A base class of other adapters."""

    @property
    def is_sharded(self) -> bool:
        """Always False."""
        return False

    def at_rest(self) -> None:
        """Does nothing."""

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """Returns each tensor in full, and this rank's part of each DTensor."""
        return [block_of(name, tensor) for name, tensor in named]

    def hand_out(self) -> None:
        """Does nothing."""

    def begin_step(self) -> None:
        """Does nothing."""

    def before_barrier(self) -> None:
        """Does nothing."""

    def undo(self, *, in_backward: bool) -> None:
        """Does nothing."""

    def new_generation(self) -> None:
        """Does nothing."""

    def restored(self) -> None:
        """Does nothing."""
