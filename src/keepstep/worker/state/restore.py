"""Moving a shard from its live holders to a rank that lost it.

The first source sends a header over the new generation's process group: see `keepstep.worker.state.image`. Everything
else is the pipeline of
`keepstep.weights`: a plan that is the same on all sides, each source gathers its share into its H2D buffer, and the
receiver copies out of all of them, straight into parameters and optimizer state. On one machine it reads in the
sources' buffers; over a network the buckets are messages of the group. Raw bytes, nothing is unpickled. Until every
checksum has been compared the receiver counts as holding nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.cancel import CancelToken
from keepstep.errors import ChecksumMismatch, RemoteProtocolError
from keepstep.protocol.messages import Transfer
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.plan import Limits, Part, Reader, TensorForm
from keepstep.weights.channels.connection import Connection
from keepstep.weights.channels.flow import Inlet
from keepstep.weights.channels.group import Carrier, GroupInlet, GroupOutlet
from keepstep.weights.device.stages import RankPlan, SendStage, device_outlet
from keepstep.weights.memory.buffers import SlotBuffer
from keepstep.weights.memory.copies import checksum_in, copy_of
from keepstep.weights.memory.pieces import SLOT_EXTRA_BYTES, Held
from keepstep.weights.spans import Spans
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import StateHeader, finish, targets
from keepstep.worker.state.protected import ProtectedState

_CHECKSUM_BYTES = 8
_SIZE_BYTES = 8
_SHORT_BYTES = 4096
"""What is sent at once of a message; all but the header of a large model. A round trip less for each."""
_HEADER_TAG = 0x4B530
_CALLS, _SENDS = b"calls", b"sends"
"""A source's answer to a receiver's place."""
RESTORE_BUCKET_BYTES = 4 << 20
NUM_SLOTS = 2
"""Of each buffer: one is filled while the other is read."""
DEADLINE_S = 60.0
"""The controller has shorter deadlines for a rank that does not move; this one only ends a wait on a lost one."""
MAX_HEADER_BYTES = 1 << 30
"""A header is about 100 bytes a tensor; what claims to be larger is refused before memory is taken for it."""


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class SourceHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a source is about to send, and how."""

    limits: Limits
    state: StateHeader


@dataclasses.dataclass(frozen=True, slots=True)
class StateTransport:
    """What carries a state from one rank to another.

    Attributes:
        group: the connected group.
        stop: ends the waits on neighbours, as taking the group down ends those on the group.
    """

    group: Carrier
    stop: CancelToken


class Source:
    """What a rank sends with: its H2D buffer, made at its first transfer and kept."""

    def __init__(self, bucket_bytes: int = RESTORE_BUCKET_BYTES) -> None:
        self.limits = Limits(bucket_bytes, bucket_bytes // 2)
        self._h2d: SlotBuffer | None = None

    @property
    def h2d(self) -> SlotBuffer:
        """The buffer."""
        if self._h2d is None:
            self._h2d = SlotBuffer.create(NUM_SLOTS, self.limits.bucket_bytes + SLOT_EXTRA_BYTES)
        return self._h2d


def send_state(
    content: StateHeader,
    held: Sequence[Held],
    rank: int,
    route: Transfer,
    transport: StateTransport,
    source: Source,
    moved: Callable[[], None],
) -> None:
    """Sends this source's share of the shard to every receiver.

    Args:
        content: what the state consists of.
        held: its tensors, live or of a snapshot, in the order of ``content``; only read.
        rank: this rank, one of ``route.sources``.
        route: the same on all sides.
        transport: what carries it.
        source: what to send with.
        moved: called after each bucket, to show that the transfer lives.

    Raises:
        RuntimeError: a receiver is gone, or the group was taken down.
        CannotGoOn: a neighbour is gone.
        Cancelled: by the stop of ``transport``.
    """
    group = transport.group
    header = SourceHeader(source.limits, content)
    if rank == route.sources[0]:
        for receiver in route.receivers:
            _send_sealed(msgspec.msgpack.encode(header), receiver, group)
    plan = RankPlan(_transfer_layout(header, route), rank)
    plan.prepare(held)
    connections = {
        receiver: connection for receiver in route.receivers if (connection := _call(receiver, rank, source.h2d, group))
    }
    try:
        outlet = _Outlets(plan, source.h2d, connections, transport)
        SendStage(plan, source.h2d, outlet, Spans(), moved).run()
    finally:
        for connection in connections.values():
            connection.close()


class _Outlets:
    """To neighbours by their connections, to all others by the group."""

    def __init__(
        self, plan: RankPlan, h2d: SlotBuffer, connections: dict[int, Connection], transport: StateTransport
    ) -> None:
        self._connections = connections
        self._near = device_outlet(0, h2d, connections, DEADLINE_S, transport.stop)
        self._far = GroupOutlet(transport.group, plan.own, [h2d.view(slot) for slot in range(h2d.num_slots)])

    def announce(self, bucket: int, slot: int, readers: Collection[int]) -> None:
        self._near.announce(bucket, slot, readers)
        self._far.announce(bucket, slot, [reader for reader in readers if reader not in self._connections])

    def wait_until_free(self, slot: int) -> None:
        self._near.wait_until_free(slot)
        self._far.wait_until_free(slot)

    def wait_until_all_free(self) -> None:
        self._near.wait_until_all_free()
        self._far.wait_until_all_free()


def _call(receiver: int, rank: int, h2d: SlotBuffer, group: Carrier) -> Connection | None:
    """Calls a receiver and tells it over the group whether that worked; None if it is no neighbour."""
    place = _decode(_receive_sealed(receiver, group), neighbour.NeighbourPlace, receiver)
    connection = neighbour.call(place, rank, h2d, DEADLINE_S)
    _send_sealed(_CALLS if connection is not None else _SENDS, receiver, group)
    return connection


def receive_state(
    state: ProtectedState, step: int, rank: int, route: Transfer, transport: StateTransport, moved: Callable[[], None]
) -> int:
    """Fills this rank's objects from all sources and returns the number of bytes received.

    Until it returns the objects are in between and reach no step.

    Raises:
        StateMismatch: the model here has other names, shapes or dtypes than the source's.
        RemoteProtocolError: a checksum or header is wrong.
        RuntimeError: a source is gone, or the group was taken down.
        PeerLost: a neighbour is gone.
        Cancelled: by the stop of ``transport``.
    """
    first, group = route.sources[0], transport.group
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(neighbour.Neighbourhood())
        place = msgspec.msgpack.encode(here.place)
        # Not waited for: the first source sends its header before it receives, and each send waits for its receiver.
        told = [work for source in route.sources for work in _begin_to_send(place, source, group)]
        header = _decode(_receive_sealed(first, group), SourceHeader, first)
        content = header.state
        if content.step != step:
            raise RemoteProtocolError(f"rank {first} sends the state of step {content.step}, expected {step}")
        tensors, host_tensors = targets(state, content, "the source")
        plan = RankPlan(_transfer_layout(header, route), rank)
        for work in told:
            work.wait()
        inlets = _inlets(plan, header.limits, route, transport, here, opened)
        held = {
            index: [Held(tensor.detach(), entry.box)]
            for index, (tensor, entry) in enumerate(zip(tensors, content.all_tensors, strict=True))
        }
        num_wrong = 0
        for bucket in plan.coming:
            slot = inlets[bucket.source].take(bucket)
            num_wrong += copy_of(slot, bucket, held).scatter() != checksum_in(slot, bucket)
            inlets[bucket.source].release()
            moved()
    if num_wrong:
        raise ChecksumMismatch(f"{num_wrong} of {len(plan.coming)} buckets arrived with a wrong checksum")
    finish(state, content, host_tensors)
    return sum(piece.num_bytes for bucket in plan.coming for piece in bucket.pieces)


def _inlets(
    plan: RankPlan,
    limits: Limits,
    route: Transfer,
    transport: StateTransport,
    here: neighbour.Neighbourhood,
    opened: contextlib.ExitStack,
) -> dict[int, Inlet | GroupInlet]:
    """From each source by its connection where it is a neighbour, else by the group."""
    group = transport.group
    calling = [source for source in route.sources if _receive_sealed(source, group) == _CALLS]
    connections = here.accept(len(calling), time.monotonic() + DEADLINE_S, transport.stop)
    for connection, buffer in connections.values():
        opened.callback(buffer.close)
        opened.callback(connection.close)
    if set(connections) != set(calling):
        raise RemoteProtocolError(f"ranks {sorted(connections)} called, and {calling} said so")
    inlets: dict[int, Inlet | GroupInlet] = {}
    for source in route.sources:
        if source in connections:
            inlets[source] = Inlet(0, *connections[source], DEADLINE_S, transport.stop)
        else:
            buckets = [bucket for bucket in plan.coming if bucket.source == source]
            slots = [torch.empty(limits.bucket_bytes + SLOT_EXTRA_BYTES, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
            inlets[source] = GroupInlet(group, source, buckets, slots)
    return inlets


def _transfer_layout(header: SourceHeader, route: Transfer) -> Layout:
    """All sources hold the blocks of the header, and each receiver wants them."""
    tensors = header.state.all_tensors
    forms = tuple(TensorForm((entry.name,), entry.dtype, entry.whole, entry.element_bytes) for entry in tensors)
    parts = tuple(Part(index, entry.box) for index, entry in enumerate(tensors))
    holders = tuple(parts if rank in route.sources else () for rank in range(max(route.sources) + 1))
    readers = tuple(Reader(receiver, parts) for receiver in route.receivers)
    return Layout(forms, holders, readers, (None,) * len(readers), header.limits)


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content)


def _send_sealed(body: bytes, receiver: int, group: Carrier) -> None:
    """Sends a message: its size, its bytes and their checksum."""
    for work in _begin_to_send(body, receiver, group):
        work.wait()


def _begin_to_send(body: bytes, receiver: int, group: Carrier) -> list[dist.Work]:
    """As `_send_sealed`, without waiting: as one where the message is short, else as two."""
    sealed = b"".join([len(body).to_bytes(_SIZE_BYTES, "little"), body, _checksum(body)])
    parts = [sealed[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0"), sealed[_SHORT_BYTES:]]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
    return [group.send([tensor], receiver, _HEADER_TAG) for tensor in tensors]


def _receive_sealed(source: int, group: Carrier) -> bytes:
    """Receives what `_send_sealed` sent.

    Raises:
        RemoteProtocolError: it is too large, or its checksum is wrong.
    """
    sealed = _receive_bytes(_SHORT_BYTES, source, group)
    num_bytes = int.from_bytes(sealed[:_SIZE_BYTES], "little")
    if not 0 < num_bytes <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"rank {source} announces a header of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )
    end = _SIZE_BYTES + num_bytes
    missing = end + _CHECKSUM_BYTES - _SHORT_BYTES
    if missing > 0:
        sealed += _receive_bytes(missing, source, group)
    body = sealed[_SIZE_BYTES:end]
    if sealed[end : end + _CHECKSUM_BYTES] != _checksum(body):
        raise RemoteProtocolError(f"the header from rank {source} arrived with a wrong checksum")
    return body


def _receive_bytes(num_bytes: int, source: int, group: Carrier) -> bytes:
    message = torch.empty(num_bytes, dtype=torch.uint8)
    group.recv([message], source, _HEADER_TAG).wait()
    return message.numpy().tobytes()


def _decode(body: bytes, kind: type[_Struct], source: int) -> _Struct:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"rank {source} sent a header that does not parse: {error}") from error
