"""The layout of a rank's tensors, and whether two ranks have the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import xxhash

from keepstep.errors import StateMismatch
from keepstep.worker.groups.store import LinkStore
from keepstep.worker.state.protected import Named, ProtectedState


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: its name and how its bytes are to be read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """A new tensor of this form, its content undefined."""
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype))

    def form(self, with_strides: bool) -> str:
        """The tensor's form for a message, such as ``float32[2, 3]``."""
        strides = f" with strides {self.strides}" if with_strides else ""
        return f"{self.dtype}{list(self.shape)}{strides}"


def headers_of(named: Named) -> tuple[TensorHeader, ...]:
    """The headers of named tensors, in their order."""
    return tuple(
        TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())
        for name, tensor in named
    )


def check_same_layout(own: Sequence[TensorHeader], theirs: Sequence[TensorHeader], who: str) -> None:
    """Compares this rank's tensors with a replica's.

    Raises:
        StateMismatch: names the first tensor that differs, and how.
    """
    if own == theirs:
        return
    mine = {header.name: header for header in own}
    for header in theirs:
        if header.name not in mine:
            raise StateMismatch(f"{who} has '{header.name}', which this rank's model lacks: replicas must be equal")
        if mine[header.name] != header:
            with_strides = (mine[header.name].dtype, mine[header.name].shape) == (header.dtype, header.shape)
            own_form, their_form = mine[header.name].form(with_strides), header.form(with_strides)
            raise StateMismatch(
                f"'{header.name}' is {own_form} on this rank and {their_form} on {who}: replicas must be equal"
            )
    extra = sorted(set(mine) - {header.name for header in theirs})
    raise StateMismatch(f"this rank's model has {extra[:3]}, which {who} lacks (or in another order)")


def compare_with_rank_0(state: ProtectedState, rank: int, store: LinkStore) -> None:
    """Compares parameters and buffers with those of rank 0, by digest; details travel only where they differ.

    Args:
        state: this rank's protected objects.
        rank: this rank.
        store: where rank 0 lays its layout for this generation.

    Raises:
        StateMismatch: names the first tensor that differs, and how.
        PeerLost: the generation ended meanwhile.
    """
    own = headers_of([*state.parameters(), *state.buffers()])
    encoded = msgspec.msgpack.encode(own)
    digest = xxhash.xxh3_128_digest(encoded)
    if rank == 0:
        store.set("tensors", encoded)
        store.set("digest", digest)
    elif store.get("digest") != digest:
        theirs = msgspec.msgpack.decode(store.get("tensors"), type=tuple[TensorHeader, ...])
        check_same_layout(own, theirs, "rank 0")


def check_same_objects(state: ProtectedState, host: dict[str, Any], who: str) -> None:
    """Compares the protected objects themselves: their names, and the parameter groups of the optimizers.

    Args:
        state: this rank's.
        host: the other rank's `ProtectedState.host_state`.
        who: the other rank, for the message.

    Raises:
        StateMismatch: names what differs.
    """
    own = state.host_state()
    for kind, what in (("groups", "optimizer"), ("others", "object")):
        different = sorted(set(own[kind]) ^ set(host[kind]))
        if different:
            raise StateMismatch(f"{what} '{different[0]}' is protected on one of this rank and {who} only")
    for name, groups in own["groups"].items():
        if len(groups) != len(host["groups"][name]):
            raise StateMismatch(
                f"optimizer '{name}' has {len(groups)} parameter groups here and {len(host['groups'][name])} on {who}"
            )
