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
    """The name of a shard: a digest of its blocks' names, dtypes and places, but not of what is in them.

    Args:
        blocks: what a rank holds.
        label: tells apart what the blocks do not: ``protect(shard=...)``.
    """
    digest = xxhash.xxh3_64(label.encode())
    for block in blocks:
        digest.update(f"{block.names} {block.dtype} {block.whole} {block.held.box}\n".encode())
    return digest.hexdigest()


class ParallelLayout(Protocol):
    """One rank's adapter. All methods are called by the training thread."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks may hold different parts. If not, all ranks must begin with the same state."""
        ...

    def at_rest(self) -> None:
        """Before the first step: has the modules show the parameters that they are trained by."""
        ...

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """What this rank holds of tensors: parameters, buffers or optimizer state, by their names."""
        ...

    def hand_out(self) -> None:
        """A step is handed out: remembers what `undo` puts back. The script's lines before the step come after it."""
        ...

    def begin_step(self) -> None:
        """A step begins: has all ranks begin in the same way."""
        ...

    def before_barrier(self) -> None:
        """The gradients are complete: shares with the other ranks what else must be the same before the update."""
        ...

    def undo(self, *, in_backward: bool) -> None:
        """A step was interrupted before its update: puts back what forward and backward have done to the wrappers.

        Args:
            in_backward: whether it was interrupted in its backward.
        """
        ...

    def new_generation(self) -> None:
        """All ranks of a generation, replacements among them, are about to begin a step together."""
        ...

    def restored(self) -> None:
        """The state came from other ranks or a checkpoint: has what hangs on it follow, such as views of gradients."""
        ...


class Replicated:
    """No wrapper at all: every rank holds all of every tensor, and a step needs nothing. Adapters may build on it."""

    @property
    def is_sharded(self) -> bool:
        """No."""
        return False

    def at_rest(self) -> None:
        """Nothing."""

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """All of each tensor, and of a DTensor this rank's part."""
        return [block_of(name, tensor) for name, tensor in named]

    def hand_out(self) -> None:
        """Nothing."""

    def begin_step(self) -> None:
        """Nothing."""

    def before_barrier(self) -> None:
        """Nothing."""

    def undo(self, *, in_backward: bool) -> None:
        """Nothing."""

    def new_generation(self) -> None:
        """Nothing."""

    def restored(self) -> None:
        """Nothing."""
