"""Moving a shard from its live holders to a rank that lost it.

The plan (`keepstep.protocol.transfer`) is the same on both sides; here it is carried out over the new generation's
process group. The first source sends a header: names, dtypes, shapes and strides of all tensors, the host state, and
which parameters have a gradient. On one machine the receiver then reads its buckets out of the sources' memory; over
a network all sources send theirs at once, large tensors from where they are to where they belong. Last come the xxh3
checksums of what they sent. Raw bytes, nothing is unpickled. Until every checksum has been compared the receiver counts
as holding nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.messages import Transfer
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.protocol.transfer.plan import Bucket, Limits, Part, Reader, TensorForm, plan_transfer
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.weights.memory.copies import BucketCopy, Held
from keepstep.worker.groups.communicator import Carrier
from keepstep.worker.state import neighbour, tree
from keepstep.worker.state.layout import TensorHeader, check_same_layout, check_same_objects, headers_of
from keepstep.worker.state.protected import ProtectedState

_CHECKSUM_BYTES = 8
_HEADER_TAG = 0x4B530
_BUCKET_TAG = 0x4B531
_CHECKSUM_TAG = 0x4B532
_READS, _WAITS = b"reads", b"waits"
"""A receiver's answer to an offer."""
DEFAULT_BUCKET_BYTES = 2 << 20
"""Measured over loopback with 120 MB and two sources (2 cores, November 2026): 2 MiB took three quarters of the
processor time of 8 MiB, for its buffers stay in the cache; at 1 MiB and below the cost of each message shows."""
LONE_SHARE = 8
"""A tensor of at least this part of a bucket travels alone, from its own memory into that of the receiver."""
WINDOW = 8
"""Buckets under way at a time on each side, which bounds the memory for gathered ones to 16 MiB."""
MAX_HEADER_BYTES = 1 << 30
"""A header is about 100 bytes a tensor; what claims to be larger is refused before memory is taken for it."""


Struct = TypeVar("Struct", bound=msgspec.Struct)


class StateHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a source is about to send."""

    step: int
    parameters: tuple[TensorHeader, ...]
    buffers: tuple[TensorHeader, ...]
    optimizer: tuple[TensorHeader, ...]
    host_tensors: tuple[TensorHeader, ...]
    host: bytes
    with_gradient: tuple[int, ...]


def send_state(
    state: ProtectedState, step: int, rank: int, route: Transfer, group: Carrier, moved: Callable[[], None]
) -> None:
    """Sends this source's share of the shard to every receiver.

    Args:
        state: the live objects; only read.
        step: the step that the parameters are at.
        rank: this rank, one of ``route.sources``.
        route: the same on all sides.
        group: the connected group.
        moved: called after each message, to show that the transfer lives.

    Raises:
        RuntimeError: a receiver is gone, or the group was taken down.
    """
    header, tensors = describe(state, step)
    if rank == route.sources[0]:
        for receiver in route.receivers:
            _send_sealed(msgspec.msgpack.encode(header), receiver, group)
    views = [byte_view(tensor) for tensor in tensors]
    distant = [receiver for receiver in route.receivers if not _is_read_by(receiver, views, group)]
    own = [bucket for bucket in _plan(views, route.sources) if bucket.source == rank]
    checksums = torch.empty(len(own), _CHECKSUM_BYTES, dtype=torch.uint8)
    window = _Window()
    for index, bucket in enumerate(own):
        message = _content(views, bucket)
        window.add([group.send([message], receiver, _BUCKET_TAG) for receiver in distant])
        checksums[index] = _checksum(message)  # while it is being sent, or read
        moved()
    window.drain()
    if own:
        window.add([group.send([checksums], receiver, _CHECKSUM_TAG) for receiver in route.receivers])
        window.drain()


def _is_read_by(receiver: int, views: list[torch.Tensor], group: Carrier) -> bool:
    """Offers this source's memory to a receiver; whether it reads from there by itself."""
    reader = _decode(_receive_sealed(receiver, group), neighbour.Place, receiver)
    _send_sealed(msgspec.msgpack.encode(neighbour.offer_to(reader, views)), receiver, group)
    return _receive_sealed(receiver, group) == _READS


def receive_state(state: ProtectedState, step: int, route: Transfer, group: Carrier, moved: Callable[[], None]) -> int:
    """Fills this rank's objects from all sources and returns the number of bytes received.

    Until it returns the objects are in between and reach no step.

    Raises:
        StateMismatch: the model here has other names, shapes or dtypes than the source's.
        RemoteProtocolError: a checksum or header is wrong.
        RuntimeError: a source is gone, or the group was taken down.
    """
    header = _decode(_receive_sealed(route.sources[0], group), StateHeader, route.sources[0])
    if header.step != step:
        raise RemoteProtocolError(f"rank {route.sources[0]} sends the state of step {header.step}, expected {step}")
    tensors, host_tensors = _targets(state, header)
    views = [byte_view(tensor) for tensor in tensors]
    offers = {source: offer for source in route.sources if (offer := _accept_offer(source, views, group)) is not None}
    plan = _plan(views, route.sources)
    found: dict[int, list[torch.Tensor]] = {source: [] for source in route.sources}
    arriving: deque[tuple[Bucket, torch.Tensor, dist.Work]] = deque()
    for bucket in plan:
        if bucket.source in offers:
            neighbour.read_bucket(offers[bucket.source], bucket, views)
            found[bucket.source].append(_checksum(_content(views, bucket)))
            moved()
            continue
        message = _lone_view(views, bucket) if bucket.is_lone else torch.empty(bucket.num_bytes, dtype=torch.uint8)
        arriving.append((bucket, message, group.recv([message], bucket.source, _BUCKET_TAG)))
        if len(arriving) > WINDOW:
            _arrived(*arriving.popleft(), views, found, moved)
    while arriving:
        _arrived(*arriving.popleft(), views, found, moved)
    for source, checksums in found.items():
        _compare_checksums(source, checksums, group)
    _finish(state, header, host_tensors)
    return sum(piece.num_bytes for bucket in plan for piece in bucket.pieces)


def _accept_offer(source: int, views: list[torch.Tensor], group: Carrier) -> neighbour.Offer | None:
    """Asks a source for its memory; None if it is to send instead."""
    _send_sealed(msgspec.msgpack.encode(neighbour.here()), source, group)
    offer = _decode(_receive_sealed(source, group), neighbour.Offer, source)
    reads = neighbour.can_read(offer, views)
    _send_sealed(_READS if reads else _WAITS, source, group)
    return offer if reads else None


def _arrived(
    bucket: Bucket,
    message: torch.Tensor,
    work: dist.Work,
    views: list[torch.Tensor],
    found: dict[int, list[torch.Tensor]],
    moved: Callable[[], None],
) -> None:
    """Waits for one bucket, notes its checksum, and puts shared ones in their places."""
    work.wait()
    found[bucket.source].append(_checksum(message))
    if not bucket.is_lone:
        BucketCopy(message, bucket, _held(views, bucket)).scatter()
    moved()


def _compare_checksums(source: int, own: list[torch.Tensor], group: Carrier) -> None:
    """Raises:
    RemoteProtocolError: what arrived is not what ``source`` sent.
    """
    if not own:
        return
    theirs = torch.empty(len(own), _CHECKSUM_BYTES, dtype=torch.uint8)
    group.recv([theirs], source, _CHECKSUM_TAG).wait()
    wrong = [index for index, checksum in enumerate(own) if not torch.equal(checksum, theirs[index])]
    if wrong:
        raise RemoteProtocolError(
            f"{len(wrong)} of {len(own)} buckets from rank {source} arrived with a wrong checksum"
        )


def describe(state: ProtectedState, step: int) -> tuple[StateHeader, list[torch.Tensor]]:
    """The header of the state as it is now, and the tensors in the order in which they are sent."""
    host, host_tensors = state.host_bytes()
    parts = (state.parameters(), state.buffers(), state.optimizer_tensors())
    host_named = [(str(index), tensor) for index, tensor in enumerate(host_tensors)]
    headers = [headers_of(part) for part in (*parts, host_named)]
    header = StateHeader(step, headers[0], headers[1], headers[2], headers[3], host, state.gradient_marks())
    return header, [tensor for part in (*parts, host_named) for _name, tensor in part]


def _targets(state: ProtectedState, header: StateHeader) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors to write into, in the header's order; optimizer state that is not there yet is made."""
    parameters, buffers = state.parameters(), state.buffers()
    forms = [torch.empty(0) for _ in header.host_tensors]
    check_same_objects(state, tree.unpack(msgspec.msgpack.decode(header.host), forms), "the source")
    check_same_layout(headers_of(parameters), header.parameters, "the source")
    check_same_layout(headers_of(buffers), header.buffers, "the source")
    existing = dict(state.optimizer_tensors())
    own = {entry.name: entry for entry in headers_of(list(existing.items()))}
    if set(own) - {entry.name for entry in header.optimizer}:
        state.drop_optimizer_state()
        existing, own = {}, {}
    optimizer = []
    for entry in header.optimizer:
        if own.get(entry.name) != entry:
            existing[entry.name] = entry.empty()
            state.place_optimizer_tensor(entry.name, existing[entry.name])
        optimizer.append(existing[entry.name])
    host_tensors = [entry.empty() for entry in header.host_tensors]
    return [*(t for _n, t in parameters), *(t for _n, t in buffers), *optimizer, *host_tensors], host_tensors


def _finish(state: ProtectedState, header: StateHeader, host_tensors: list[torch.Tensor]) -> None:
    state.load_host_state(tree.unpack(msgspec.msgpack.decode(header.host), host_tensors))
    state.place_gradients(header.with_gradient)


def _plan(views: list[torch.Tensor], sources: Sequence[int]) -> tuple[Bucket, ...]:
    """What each source sends: all of them hold everything, as bytes, and each receiver wants everything."""
    forms = [TensorForm((str(index),), "uint8", (view.numel(),), 1) for index, view in enumerate(views)]
    everything = [Part(index, whole(form.shape)) for index, form in enumerate(forms)]
    limits = Limits(DEFAULT_BUCKET_BYTES, DEFAULT_BUCKET_BYTES // LONE_SHARE)
    return plan_transfer(forms, dict.fromkeys(sources, everything), [Reader(0, tuple(everything))], limits).buckets


class _Window:
    """What is being sent: at most ``WINDOW`` buckets, whose memory must not change until they are through."""

    def __init__(self) -> None:
        self._works: deque[list[dist.Work]] = deque()

    def add(self, works: list[dist.Work]) -> None:
        """Notes one bucket on its way to all receivers; waits for the oldest where there are too many."""
        self._works.append(works)
        if len(self._works) > WINDOW:
            self._wait_for_oldest()

    def drain(self) -> None:
        """Waits until everything has been sent."""
        while self._works:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work in self._works.popleft():
            work.wait()


def _lone_view(views: list[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    """The tensor's own memory that is the bucket's whole content."""
    (piece,) = bucket.pieces
    return neighbour.run_of(views, piece)


def _content(views: list[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    """The bytes of a bucket as one flat tensor: a view where it is lone, else a copy."""
    if bucket.is_lone:
        return _lone_view(views, bucket)
    content = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    BucketCopy(content, bucket, _held(views, bucket)).gather()
    return content


def _held(views: list[torch.Tensor], bucket: Bucket) -> dict[int, Held]:
    return {p.tensor: Held(views[p.tensor], Box((0,), (views[p.tensor].numel(),))) for p in bucket.pieces}


def _checksum(content: torch.Tensor) -> torch.Tensor:
    """xxh3 of a flat uint8 tensor, shape [8]."""
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(content.numpy().data)), dtype=torch.uint8)


def _send_sealed(body: bytes, receiver: int, group: Carrier) -> None:
    """Sends a short message: its size, then its bytes and their checksum."""
    content = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    group.send([torch.tensor([len(body)], dtype=torch.int64)], receiver, _HEADER_TAG).wait()
    group.send([torch.cat([content, _checksum(content)])], receiver, _HEADER_TAG).wait()


def _receive_sealed(source: int, group: Carrier) -> bytes:
    """Receives what `_send_sealed` sent.

    Raises:
        RemoteProtocolError: it is too large, or its checksum is wrong.
    """
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], source, _HEADER_TAG).wait()
    num_bytes = int(size.item())
    if not 0 < num_bytes <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"rank {source} announces a header of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )
    message = torch.empty(num_bytes + _CHECKSUM_BYTES, dtype=torch.uint8)
    group.recv([message], source, _HEADER_TAG).wait()
    if not torch.equal(message[num_bytes:], _checksum(message[:num_bytes])):
        raise RemoteProtocolError(f"the header from rank {source} arrived with a wrong checksum")
    return message[:num_bytes].numpy().tobytes()


def _decode(body: bytes, kind: type[Struct], source: int) -> Struct:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"rank {source} sent a header that does not parse: {error}") from error
