"""The layout of a rank's tensors and host values, and its comparison between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.errors import StateMismatch
from keepstep.protocol.transfer.boxes import Box
from keepstep.weights.memory.blocks import NamedBlock, is_dtensor
from keepstep.weights.memory.bytes_of import host_bytes
from keepstep.worker.groups.store import LinkStore
from keepstep.worker.state import tree
from keepstep.worker.state.protected import Modes, ProtectedState


class Found(NamedTuple):
    """When a difference between replicas was found, and what to do about it: the end of an error message."""

    when: str
    advice: str


AT_START = Found(
    "before the first step",
    "a lost rank gets its state from a rank that holds the same: build the same model on every rank (wrap it in "
    "DistributedDataParallel, seed alike) and load the same checkpoint everywhere. Ranks whose parts differ under "
    'equal names, as experts do, say so: protect(shard="...") with another text for each part',
)
RESTORED = Found(
    "after it was restored",
    "something that it computes with has begun anew, or was lost on the way. Let the state_dict() of the object say "
    "it, and give the object to protect()",
)

NOT_RESTORED = (
    "is not what was restored: the load_state_dict() of that object has not set it, or has set something else. What "
    "state_dict() gives must be what it gives after load_state_dict()"
)
"""The end of an error message about a value."""


def later(step: int) -> Found:
    """Returns what to say of a difference that was found in a step."""
    return Found(
        f"in step {step}",
        "a lost rank gets its state from a rank that holds the same: average gradients over all ranks "
        "(DistributedDataParallel), and what a forward changes as well (broadcast_buffers=True, SyncBatchNorm). An "
        'optimizer that gives each rank a part of its state needs protect(shard=f"rank {session.rank}"), and values '
        "of each rank's own session.state(per_rank=True) or protect(per_rank=...)",
    )


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The name and memory layout of one tensor, or of one block of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the block that a rank holds."""
    strides: tuple[int, ...]
    start: tuple[int, ...]
    """The block's first index in the whole tensor."""
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    is_dtensor: bool
    """Whether it is a DTensor, of which this is the local tensor."""
    device: str
    """The type of device that it is on."""

    @property
    def box(self) -> Box:
        """The block's offset and size in the whole tensor."""
        return Box(self.start, self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def num_elements(self) -> int:
        """Number of elements in the block."""
        return math.prod(self.shape)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocates an uninitialized tensor with this layout.

        Args:
            device: device of the tensor, unless this header is of a tensor on the CPU.
        """
        where = torch.device("cpu") if self.device == "cpu" else device
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device=where)

    @property
    def num_bytes(self) -> int:
        """Bytes of the block, which is contiguous in memory in some order of dimensions."""
        return math.prod(self.shape) * self.element_bytes

    def tensor_in(self, memory: torch.Tensor) -> torch.Tensor:
        """A view of ``memory`` as a tensor with this layout.

        Args:
            memory: uint8, flat, at least `num_bytes` long, with the bytes in the order of `byte_view`.
        """
        flat = memory[: self.num_bytes].view(getattr(torch, self.dtype))
        return flat.as_strided(self.shape, self.strides)

    def form(self, with_strides: bool) -> str:
        """The tensor's form for a message, such as ``float32[2, 3]``."""
        strides = f" with strides {self.strides}" if with_strides else ""
        part = f" from {list(self.start)} on of {list(self.whole)}" if self.shape != self.whole else ""
        kind = " of a DTensor" if self.is_dtensor else ""
        device = f" on {self.device}" if self.device != "cpu" else ""
        return f"{self.dtype}{list(self.shape)}{part}{kind}{strides}{device}"


def headers_of(blocks: Iterable[NamedBlock]) -> tuple[TensorHeader, ...]:
    """The headers of a rank's blocks, in the same order."""
    return tuple(
        TensorHeader(
            block.names[0],
            block.dtype,
            block.held.box.shape,
            block.held.tensor.stride(),
            block.held.box.start,
            block.whole,
            is_dtensor(block.owners[0]),
            block.held.tensor.device.type,
        )
        for block in blocks
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
            with_strides = mine[header.name].form(False) == header.form(False)
            own_form, their_form = mine[header.name].form(with_strides), header.form(with_strides)
            raise StateMismatch(
                f"'{header.name}' is {own_form} on this rank and {their_form} on {who}: replicas must be equal"
            )
    extra = sorted(set(mine) - {header.name for header in theirs})
    raise StateMismatch(f"this rank's model has {extra[:3]}, which {who} lacks (or in another order)")


class Start(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A description of a rank's initial state: headers of tensors, names of host values, and a digest of each."""

    tensors: tuple[TensorHeader, ...]
    host: tuple[str, ...]
    digests: tuple[bytes, ...]
    """xxh3 (64 bit) of the content of each tensor, then of each host value."""


def content_digest(tensor: torch.Tensor) -> bytes:
    """xxh3 (64 bit) of the bytes of a tensor."""
    return xxhash.xxh3_64_digest(host_bytes(tensor))


def start_of(
    state: ProtectedState, first_step: int = 0, digest: Callable[[str, torch.Tensor], bytes] | None = None
) -> Start:
    """Describes this rank's current state.

    Args:
        state: this rank's protected objects.
        first_step: the step that the rank's script begins with.
        digest: returns the `content_digest` of the tensor with a name, which may be known already.
    """
    blocks = state.blocks()
    host = {"steps(start=...)": first_step, **dict(_host_values(state.host_state()))}
    digests = [
        content_digest(block.held.tensor) if digest is None else digest(block.names[0], block.held.tensor)
        for block in blocks
    ]
    return Start(
        headers_of(blocks), tuple(host), (*digests, *(bytes.fromhex(tree.digest(each)) for each in host.values()))
    )


def digest_of_copy(state: ProtectedState) -> str:
    """xxh3 (128 bit) of all that replicas hold alike: what `start_of` describes."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(start_of(state)))


def gathered(own: bytes, world_size: int) -> list[bytes]:
    """All-gathers the same number of bytes from each rank. While the group is broken, it returns this rank's bytes."""
    if world_size == 1:
        return [own]
    source = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    output = torch.empty(world_size * len(own), dtype=torch.uint8)
    group = dist.group.WORLD
    assert group is not None
    group._allgather_base(output, source).wait()  # torch's public wrapper is slower and issues a deprecation warning
    return [row.tobytes() for row in output.view(world_size, -1).numpy()]


def compare_replicas(state: ProtectedState, first_step: int, rank: int, store: LinkStore) -> None:
    """Compares this rank's initial state with that of the first replica in the store, by digest.

    Details are exchanged only on a mismatch. Equal names, shapes and dtypes do not make two ranks replicas: stages of a
    pipeline can be alike in all of these. If no state is sharded, all ranks are replicas of rank 0.

    Args:
        state: this rank's protected objects.
        first_step: the step that this rank's script begins with.
        rank: this rank.
        store: the store of this generation. The first replica writes its description there.

    Raises:
        StateMismatch: the states differ; the message names the first tensor or host value that differs, and how.
        PeerLost: the generation ended meanwhile.
    """
    own = start_of(state, first_step)
    encoded = msgspec.msgpack.encode(own)
    digest = xxhash.xxh3_128_digest(encoded)
    prefix = f"{state.shard()}/" if state.is_sharded else ""
    is_first = store.add(f"{prefix}ranks", 1) == 1 if state.is_sharded else rank == 0
    if is_first:
        store.set(f"{prefix}rank", str(rank))
        store.set(f"{prefix}start", encoded)
        store.set(f"{prefix}digest", digest)
    elif store.get(f"{prefix}digest") != digest:
        first = msgspec.msgpack.decode(store.get(f"{prefix}start"), type=Start)
        check_same_start(own, first, rank, int(store.get(f"{prefix}rank")))


def check_first_step(own: int, rank: int, store: LinkStore) -> None:
    """Compares the step with which the script of this rank begins with that of rank 0.

    Raises:
        StateMismatch: they differ.
        PeerLost: the generation ended meanwhile.
    """
    if rank == 0:
        store.set("first step", str(own))
    elif (first := int(store.get("first step"))) != own:
        raise StateMismatch(
            f"resume(): load() has returned {own} on rank {rank} and {first} on rank 0: have all ranks load the same "
            "checkpoint, for example the one that rank 0 has found, by broadcast_object_list() in load()"
        )


def check_same_start(own: Start, theirs: Start, rank: int, first: int = 0, found: Found = AT_START) -> None:
    """Compares the initial states of rank ``rank`` and rank ``first``, or their states at a later step.

    Raises:
        StateMismatch: names the first tensor or host value that differs, both ranks, and what to do.
    """
    if own == theirs:
        return
    for mine, its in zip(own.tensors, theirs.tensors, strict=False):
        if mine.name == its.name and mine.device != its.device:
            raise StateMismatch(
                f"'{mine.name}' is on {mine.device} on rank {rank} and on {its.device} on rank {first}: replicas "
                "compute the same bits on the same type of device alone; use session.device on every rank"
            )
    check_same_layout(own.tensors, theirs.tensors, f"rank {first}")
    if own.host != theirs.host:
        extra = sorted(set(own.host) ^ set(theirs.host)) or ["another order of the host values"]
        raise StateMismatch(f"only one of rank {rank} and rank {first} has {extra[0]}: replicas must be equal")
    names = [f"'{header.name}'" for header in own.tensors] + [f"the host value {name}" for name in own.host]
    different = [name for name, mine, its in zip(names, own.digests, theirs.digests, strict=True) if mine != its]
    raise StateMismatch(
        f"{different[0]} differs between rank {rank} and rank {first} {found.when} ({len(different)} of {len(names)} "
        f"values do), and {found.advice}"
    )


def _host_values(host: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each host value with its name. A protected object has one for each key of its ``state_dict()``."""
    for name, groups in host["groups"].items():
        for index, group in enumerate(groups):
            yield from ((f"{name}.param_groups[{index}][{key!r}]", value) for key, value in group.items())
    yield from ((f"{name}.state", value) for name, value in host["scalars"].items())
    for name, value in host["optimizers"].items():
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    for name, value in host["modules"].items():
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    for name, value in host["others"].items():
        if isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        else:
            yield name, value


def buffers_like(state: ProtectedState, wanted: Sequence[TensorHeader], modes: Modes, who: str) -> list[torch.Tensor]:
    """Registers the buffers that another process has. Those of another form are new, and not initialized.

    Args:
        state: this rank's protected objects.
        wanted: the other's buffers.
        modes: the other's.
        who: the other process, for messages.

    Returns:
        the buffers' local tensors, in the order of ``wanted``.

    Raises:
        StateMismatch: a buffer is sharded and of another form, or its module is not here.
    """
    blocks = state.layout.blocks
    own = {header.name: header for header in headers_of(blocks(state.buffers()))}
    other = [header for header in wanted if own.get(header.name) != header]
    if sharded := [header for header in other if header.is_dtensor or header.shape != header.whole]:
        check_same_layout([own[header.name] for header in sharded if header.name in own], sharded, who)
    new = {header.name: header.empty(state.device) for header in other}
    state.place_buffers([header.name for header in wanted], new, modes)
    by_name = {block.names[0]: block.held.tensor for block in blocks(state.buffers())}
    return [by_name[header.name] for header in wanted]


def check_restored(state: ProtectedState, host: dict[str, Any], optimizer: Iterable[str]) -> None:
    """Checks that the state is now what was restored, and nothing beyond it.

    Args:
        state: this rank's protected objects.
        host: the host state that was restored.
        optimizer: names of the optimizers' tensors that were restored.

    Raises:
        StateMismatch: names the first value that differs.
    """
    wanted, own = dict(_host_values(host)), dict(_host_values(state.host_state()))
    tensors = {name for name, _tensor in state.optimizer_tensors()}
    places = sorted((own.keys() ^ wanted.keys()) | tensors.symmetric_difference(optimizer))
    for name in (name for name in own if name in wanted):
        if (place := tree.difference(own[name], wanted[name])) is not None:
            places.append(name + place)
    if places:
        raise StateMismatch(f"{places[0]} {NOT_RESTORED}")


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
