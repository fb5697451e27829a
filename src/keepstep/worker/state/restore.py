"""Sends a shard from its live holders to a rank that lost it.

The first source sends a header over the new generation's process group: see `keepstep.worker.state.image`. The rest is
the pipeline of `keepstep.weights`. All ranks compute the same plan. All sources gather their shares into their H2D
buffers at the same time. The receiver copies from all of these buffers directly into parameters and optimizer state. On
one machine it maps the sources' buffers; over a network the process group sends the buckets. The data are raw bytes;
nothing is unpickled. Until the receiver has verified every checksum, its copy has an empty reach.

If the state is on a GPU and all receivers can map that GPU's memory (CUDA IPC), the source gathers buckets on the GPU,
and the state never passes through the host. Otherwise the buffer is in host memory. No device holds a second copy of
the state, only buckets: see `GPU_PEAK_BYTES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.cancel import CancelToken
from keepstep.errors import BufferUnavailable, ChecksumMismatch, RemoteProtocolError
from keepstep.protocol.messages import Transfer
from keepstep.protocol.transfer.layout import Layout
from keepstep.protocol.transfer.plan import Limits, Part, Reader, TensorForm
from keepstep.weights.channels.connection import Connection
from keepstep.weights.channels.flow import Inlet
from keepstep.weights.channels.group import Carrier, GroupInlet, GroupOutlet
from keepstep.weights.device.stages import RankPlan, SendStage, device_outlet
from keepstep.weights.memory.buffers import Buffer, make_buffer
from keepstep.weights.memory.copies import checksum_in, copy_of
from keepstep.weights.memory.gpu_buffers import MemoryNotMapped, uuid_of, visible_gpus
from keepstep.weights.memory.gpu_copies import on_stream
from keepstep.weights.memory.pieces import CHECKSUM_BYTES, SLOT_EXTRA_BYTES, Held
from keepstep.weights.spans import Spans
from keepstep.worker.state import neighbour
from keepstep.worker.state.image import StateHeader, finish, targets
from keepstep.worker.state.protected import ProtectedState

_SIZE_BYTES = 8
_SHORT_BYTES = 4096
"""Bytes of a message that are sent together with its size. All messages fit, except the header of a large model, so
each saves a round trip."""
_HEADER_TAG = 0x4B530
_CALLS, _SENDS = b"calls", b"sends"
"""A source's answer to a receiver's place."""
RESTORE_BUCKET_BYTES = 4 << 20
GPU_BUCKET_BYTES = 32 << 20
"""Bucket size for a state on a GPU. Launches and a message cost about 0.1 ms per bucket, and reading this many bytes
from another GPU over NVLink takes about as long. Not measured on a GPU."""
NUM_SLOTS = 2
"""Number of slots in each buffer: one is filled while the other is read."""
GPU_PEAK_BYTES = 7 * GPU_BUCKET_BYTES
"""Peak GPU memory of a transfer in each process, without the restored tensors. A source has two slots, a receiver at
most one. A checksum needs 8 bytes of factors, which are kept, and 8 bytes of products for each 4 bytes of a bucket. The
seventh bucket is for rounding."""
DEADLINE_S = 60.0
"""Ends the wait for a lost rank. The controller has shorter deadlines for a rank that makes no progress."""
MAX_HEADER_BYTES = 1 << 30
"""A header takes about 100 bytes per tensor. A larger header is refused before memory is allocated for it."""


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class SourceHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A source's announcement: the state that it will send, and the form of the transfer."""

    limits: Limits
    state: StateHeader


@dataclasses.dataclass(frozen=True, slots=True)
class StateTransport:
    """The means of transport for a state.

    Attributes:
        group: the connected group.
        stop: cancels waits on neighbours. (Aborting the group ends waits on the group.)
    """

    group: Carrier
    stop: CancelToken


class Source:
    """A rank's H2D buffer for sending. A buffer in host memory is kept after its first transfer."""

    def __init__(self, bucket_bytes: int | None = None) -> None:
        """Args:
        bucket_bytes: size of a bucket; None selects a size for the device.
        """
        self._bucket_bytes = bucket_bytes
        self._host: Buffer | None = None

    def limits(self, device: torch.device) -> Limits:
        """The sizes by which a state is split into buckets. They are the same on all sources of a transfer.

        Args:
            device: device of the state.
        """
        usual = RESTORE_BUCKET_BYTES if device.type == "cpu" else GPU_BUCKET_BYTES
        num_bytes = self._bucket_bytes or usual
        return Limits(num_bytes, num_bytes // 2)

    @contextlib.contextmanager
    def buffer(self, device: torch.device, limits: Limits) -> Iterator[Buffer]:
        """Yields a buffer on a device for one transfer. It is in host memory if the device lacks free memory."""
        slot_bytes = limits.bucket_bytes + SLOT_EXTRA_BYTES
        own = None
        if device.type != "cpu":
            with contextlib.suppress(BufferUnavailable):
                own = make_buffer(device, NUM_SLOTS, slot_bytes)
        if own is None:
            yield self._host_buffer(slot_bytes)
            return
        try:
            yield own
        finally:
            own.close()  # torch keeps the memory until no receiver maps it

    def _host_buffer(self, slot_bytes: int) -> Buffer:
        if self._host is None or self._host.slot_bytes < slot_bytes:
            self._host = make_buffer(torch.device("cpu"), NUM_SLOTS, slot_bytes)
        return self._host


def device_of(held: Sequence[Held]) -> torch.device:
    """The GPU of the first tensor that is on a GPU; the CPU if none is."""
    return next((each.tensor.device for each in held if each.tensor.is_cuda), torch.device("cpu"))


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
        content: header of the state.
        held: tensors of the state, live or from a snapshot, in the order of ``content``. They are only read. No stream
            may write to them meanwhile.
        rank: this rank, one of ``route.sources``.
        route: the sources and receivers; the same on all ranks.
        transport: the process group and its cancel token.
        source: this rank's buffer.
        moved: called after each bucket, to report progress.

    Raises:
        RuntimeError: a receiver is gone, or the group was aborted.
        CannotGoOn, PeerLost: a neighbour is gone.
        Cancelled: ``transport.stop`` was set.
    """
    group, device = transport.group, device_of(held)
    header = SourceHeader(source.limits(device), content)
    if rank == route.sources[0]:
        for receiver in route.receivers:
            _send_sealed(msgspec.msgpack.encode(header), receiver, group)
    plan = RankPlan(_transfer_layout(header, route), rank)
    plan.prepare(held)
    places = {
        receiver: _decode(_receive_sealed(receiver, group), neighbour.NeighbourPlace, receiver)
        for receiver in route.receivers
    }
    with contextlib.ExitStack() as opened:
        connections: dict[int, Connection] = {}
        for receiver, place in places.items():
            if (connection := neighbour.reach(place)) is not None:
                connections[receiver] = connection
                opened.callback(connection.close)
        where = device if _can_map(device, places, connections) else torch.device("cpu")
        h2d = opened.enter_context(source.buffer(where, header.limits))
        for receiver in route.receivers:
            if receiver in connections:
                neighbour.give_buffer(connections[receiver], rank, h2d, DEADLINE_S)
            _send_sealed(_CALLS if receiver in connections else _SENDS, receiver, group)
        SendStage(plan, h2d, _Outlets(plan, h2d, connections, transport), Spans(), moved).run()


def _can_map(device: torch.device, places: Mapping[int, neighbour.NeighbourPlace], reached: Collection[int]) -> bool:
    """Whether all receivers can map memory of a device."""
    if device.type == "cpu":
        return False
    uuid = uuid_of(device.index)
    return all(receiver in reached and uuid in place.gpus for receiver, place in places.items())


class _Outlets:
    """Announces buckets to neighbours over their connections, and sends them to all other ranks over the group."""

    def __init__(
        self, plan: RankPlan, h2d: Buffer, connections: dict[int, Connection], transport: StateTransport
    ) -> None:
        self._connections = connections
        self._near = device_outlet(0, plan, connections, DEADLINE_S, transport.stop)
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


class Landing:
    """The receiver's side on a GPU: maps sources' GPU memory and copies buckets to its own GPU."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: device of this rank's state.
        """
        self._device = device
        self._slot: torch.Tensor | None = None
        self.gpus = () if device.type == "cpu" else visible_gpus()
        """UUIDs of the GPUs whose memory this process can map."""

    @contextlib.contextmanager
    def mapping(self) -> Iterator[None]:
        """A context for code that maps GPU memory. If CUDA cannot map it, the next transfer goes through the host.

        Raises:
            MemoryNotMapped: CUDA cannot map the memory. This RuntimeError aborts the current transfer.
        """
        try:
            yield
        except MemoryNotMapped:
            self.gpus = ()
            raise

    def bring(self, slot: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Copies the content of another GPU's slot to this rank's GPU, which computes the checksum.

        The result is valid until the next call.
        """
        if not slot.is_cuda or slot.device == self._device:
            return slot
        if self._slot is None or self._slot.numel() < slot.numel():
            self._slot = torch.empty(slot.numel(), dtype=torch.uint8, device=self._device)
        with on_stream(self._device):
            self._slot[:num_bytes].copy_(slot[:num_bytes], non_blocking=True)
        return self._slot

    def close(self) -> None:
        """Frees the memory of a transfer."""
        self._slot = None


def receive_state(
    state: ProtectedState,
    step: int,
    rank: int,
    route: Transfer,
    transport: StateTransport,
    moved: Callable[[], None],
    landing: Landing | None = None,
) -> int:
    """Fills this rank's objects from all sources and returns the number of bytes received.

    Until it returns the objects hold a mix of two states, so their reach is empty. No stream may read or write them
    meanwhile.

    Args:
        state: the protected objects.
        step: the step of the state that is expected.
        rank: this rank, one of ``route.receivers``.
        route: the sources and receivers; the same on all ranks.
        transport: the process group and its cancel token.
        moved: called after each bucket, to report progress.
        landing: the caller keeps it from one transfer to the next; None creates a new one.

    Raises:
        StateMismatch: the model here has other names, shapes or dtypes than the source's.
        RemoteProtocolError: a header is wrong.
        ChecksumMismatch: a bucket's checksum is wrong.
        RuntimeError: a source is gone, or the group was aborted.
        PeerLost: a neighbour is gone.
        Cancelled: ``transport.stop`` was set.
    """
    first, group = route.sources[0], transport.group
    landing = landing or Landing(state.device)
    with contextlib.ExitStack() as opened:
        opened.callback(landing.close)
        here = opened.enter_context(neighbour.Neighbourhood(landing.gpus))
        place = msgspec.msgpack.encode(here.place)
        # Do not wait yet: the first source sends its header before it receives, and each send waits for its receiver.
        told = [work for source in route.sources for work in _begin_to_send(place, source, group)]
        header = _decode(_receive_sealed(first, group), SourceHeader, first)
        content = header.state
        if content.step != step:
            raise RemoteProtocolError(f"rank {first} sends the state of step {content.step}, expected {step}")
        tensors, host_tensors = targets(state, content, "the source")
        plan = RankPlan(_transfer_layout(header, route), rank)
        for work in told:
            work.wait()
        with landing.mapping():
            inlets = _inlets(plan, header.limits, route, transport, here, opened)
        held = {
            index: [Held(tensor.detach(), entry.box)]
            for index, (tensor, entry) in enumerate(zip(tensors, content.all_tensors, strict=True))
        }
        num_wrong = 0
        for bucket in plan.coming:
            slot = landing.bring(inlets[bucket.source].take(bucket), bucket.num_bytes + CHECKSUM_BYTES)
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
    """The inlet for each source: over its connection if it is a neighbour, else over the group."""
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
    """The layout of the transfer: every source holds all blocks of the header, and every receiver wants all of them."""
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
    """As `_send_sealed`, without waiting. A short message is one send; a longer one is two."""
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
    missing = end + CHECKSUM_BYTES - _SHORT_BYTES
    if missing > 0:
        sealed += _receive_bytes(missing, source, group)
    body = sealed[_SIZE_BYTES:end]
    if sealed[end : end + CHECKSUM_BYTES] != _checksum(body):
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
