"""What a way to parallelise adds to a step and to a restore: the interface of its adapter.

There is one adapter for each way, in a file beside this one. It knows which part of each tensor its rank holds, and
what has to be done around a step so that the step can be undone and done again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import xxhash

from keepstep.protocol.transfer.boxes import whole
from keepstep.weights.memory.blocks import NamedBlock
from keepstep.weights.memory.pieces import Held


def shard_of(blocks: Iterable[NamedBlock]) -> str:
    """The name of a shard: a digest of its blocks' names, dtypes and places, but not of what is in them."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(f"{block.names} {block.dtype} {block.whole} {block.held.box}\n".encode())
    return digest.hexdigest()


class ParallelLayout(Protocol):
    """One rank's adapter. All methods are called by the training thread."""

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """What this rank holds of tensors: parameters, buffers or optimizer state, by their names."""
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

    def restored(self) -> None:
        """The state came from other ranks or a checkpoint: has what hangs on it follow, such as views of gradients."""
        ...


class Replicated:
    """No wrapper at all: every rank holds all of every tensor, and a step needs nothing. Adapters may build on it."""

    def blocks(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[NamedBlock]:
        """All of each tensor."""
        return [_all_of(name, tensor) for name, tensor in named]

    def begin_step(self) -> None:
        """Nothing."""

    def before_barrier(self) -> None:
        """Nothing."""

    def undo(self, *, in_backward: bool) -> None:
        """Nothing."""

    def restored(self) -> None:
        """Nothing."""


def _all_of(name: str, tensor: torch.Tensor) -> NamedBlock:
    shape = tuple(tensor.shape)
    return NamedBlock((name,), Held(tensor.detach(), whole(shape)), shape, (tensor,))
