"""The layout of a rank's tensors, and whether two ranks have the same one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
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
            raise StateMismatch(
                f"'{header.name}' is {mine[header.name].dtype}{list(mine[header.name].shape)} on this rank and "
                f"{header.dtype}{list(header.shape)} on {who}: replicas must be equal"
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
