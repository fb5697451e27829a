"""Moving a shard from its live holders to a rank that lost it.

The plan (`keepstep.protocol.transfer`) is the same on both sides; here it is carried out over the new generation's
process group. The first source sends a header: names, dtypes, shapes and strides of all tensors, the host state, and
which parameters have a gradient. Then all sources send their buckets at once. Raw bytes, each message ending in its
xxh3 checksum, nothing is unpickled. A receiver writes a bucket into its tensors only after the checksum matched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import torch
import xxhash
from torch import distributed as dist

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer import DEFAULT_BUCKET_BYTES, Bucket, plan_buckets
from keepstep.worker.groups.communicator import Communicator
from keepstep.worker.state import tree
from keepstep.worker.state.bytes_of import byte_view
from keepstep.worker.state.layout import TensorHeader, check_same_layout, headers_of
from keepstep.worker.state.protected import ProtectedState

_CHECKSUM_BYTES = 8
_HEADER_TAG = 0x4B530
_BUCKET_TAG = 0x4B531
MAX_HEADER_BYTES = 1 << 30
"""A header is about 100 bytes a tensor; what claims to be larger is refused before memory is taken for it."""


class StateHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a source is about to send."""

    step: int
    parameters: tuple[TensorHeader, ...]
    buffers: tuple[TensorHeader, ...]
    optimizer: tuple[TensorHeader, ...]
    host_tensors: tuple[TensorHeader, ...]
    host: bytes
    with_gradient: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Who sends and who receives, as ranks of the group that carries it."""

    sources: tuple[int, ...]
    receivers: tuple[int, ...]


def send_state(
    state: ProtectedState, step: int, rank: int, route: Route, group: Communicator, moved: Callable[[], None]
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
        body = msgspec.msgpack.encode(header)
        size = torch.tensor([len(body)], dtype=torch.int64)
        for receiver in route.receivers:
            group.send([size], receiver, _HEADER_TAG).wait()
            group.send([_sealed(body)], receiver, _HEADER_TAG).wait()
    views = [byte_view(tensor) for tensor in tensors]
    own = [bucket for bucket in _plan(views, route.sources) if bucket.source == rank]
    staging = _Staging(own)
    for bucket in own:
        message = staging.next(bucket)
        for piece in bucket.pieces:
            source = views[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            message[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].copy_(source)
        _seal(message)
        staging.sent([group.send([message], receiver, _BUCKET_TAG) for receiver in route.receivers])
        moved()
    staging.drain()


def receive_state(
    state: ProtectedState, step: int, route: Route, group: Communicator, moved: Callable[[], None]
) -> int:
    """Fills this rank's objects from all sources and returns the number of bytes received.

    Until it returns the objects are in between and reach no step.

    Raises:
        StateMismatch: the model here has other names, shapes or dtypes than the source's.
        RemoteProtocolError: a checksum or header is wrong.
        RuntimeError: a source is gone, or the group was taken down.
    """
    header = _receive_header(route.sources[0], group)
    if header.step != step:
        raise RemoteProtocolError(f"rank {route.sources[0]} sends the state of step {header.step}, expected {step}")
    tensors, host_tensors = _targets(state, header)
    views = [byte_view(tensor) for tensor in tensors]
    plan = _plan(views, route.sources)
    staging = _Staging(plan)
    arriving: list[tuple[Bucket, torch.Tensor, dist.Work]] = []
    received = 0
    for bucket in [*plan, None]:
        if bucket is not None:
            message = staging.next(bucket)
            arriving.append((bucket, message, group.recv([message], bucket.source, _BUCKET_TAG)))
        while len(arriving) == staging.depth or (bucket is None and arriving):
            done, content, work = arriving.pop(0)
            work.wait()
            _check(content, done)
            for piece in done.pieces:
                target = views[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
                target.copy_(content[piece.bucket_offset : piece.bucket_offset + piece.num_bytes])
            received += done.num_bytes
            moved()
    _finish(state, header, host_tensors)
    return received


def describe(state: ProtectedState, step: int) -> tuple[StateHeader, list[torch.Tensor]]:
    """The header of the state as it is now, and the tensors in the order in which they are sent."""
    host, host_tensors = state.host_bytes()
    parts = (state.parameters(), state.buffers(), state.optimizer_tensors())
    host_named = [(str(index), tensor.contiguous()) for index, tensor in enumerate(host_tensors)]
    headers = [headers_of(part) for part in (*parts, host_named)]
    header = StateHeader(step, headers[0], headers[1], headers[2], headers[3], host, state.gradient_marks())
    return header, [tensor for part in (*parts, host_named) for _name, tensor in part]


def _targets(state: ProtectedState, header: StateHeader) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors to write into, in the header's order; optimizer state that is not there yet is made."""
    parameters, buffers = state.parameters(), state.buffers()
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
            existing[entry.name] = _empty(entry)
            state.place_optimizer_tensor(entry.name, existing[entry.name])
        optimizer.append(existing[entry.name])
    host_tensors = [_empty(entry) for entry in header.host_tensors]
    return [*(t for _n, t in parameters), *(t for _n, t in buffers), *optimizer, *host_tensors], host_tensors


def _empty(entry: TensorHeader) -> torch.Tensor:
    return torch.empty_strided(entry.shape, entry.strides, dtype=getattr(torch, entry.dtype))


def _finish(state: ProtectedState, header: StateHeader, host_tensors: list[torch.Tensor]) -> None:
    state.load_host_state(tree.unpack(msgspec.msgpack.decode(header.host), host_tensors))
    state.place_gradients(header.with_gradient)


def _plan(views: list[torch.Tensor], sources: Sequence[int]) -> tuple[Bucket, ...]:
    return plan_buckets([view.numel() for view in views], sources, DEFAULT_BUCKET_BYTES)


class _Staging:
    """A ring of message buffers, taken once: at most ``depth`` messages are under way."""

    depth = 4

    def __init__(self, plan: Sequence[Bucket]) -> None:
        size = max((bucket.num_bytes for bucket in plan), default=0) + _CHECKSUM_BYTES
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(self.depth, len(plan)))]
        self._works: list[list[dist.Work]] = [[] for _ in self._buffers]
        self._at = -1

    def next(self, bucket: Bucket) -> torch.Tensor:
        """A buffer for ``bucket`` and its checksum; waits until its last content has been sent."""
        self._at = (self._at + 1) % len(self._buffers)
        self._wait(self._at)
        return self._buffers[self._at][: bucket.num_bytes + _CHECKSUM_BYTES]

    def sent(self, works: list[dist.Work]) -> None:
        """The buffer given last is being sent."""
        self._works[self._at] = works

    def drain(self) -> None:
        """Waits until everything has been sent."""
        for index in range(len(self._buffers)):
            self._wait(index)

    def _wait(self, index: int) -> None:
        for work in self._works[index]:
            work.wait()
        self._works[index] = []


def _checksum(content: torch.Tensor) -> bytes:
    return xxhash.xxh3_64_digest(content.numpy().data)


def _seal(message: torch.Tensor) -> None:
    end = message.numel() - _CHECKSUM_BYTES
    message[end:] = torch.frombuffer(bytearray(_checksum(message[:end])), dtype=torch.uint8)


def _sealed(body: bytes) -> torch.Tensor:
    message = torch.empty(len(body) + _CHECKSUM_BYTES, dtype=torch.uint8)
    message[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    _seal(message)
    return message


def _check(message: torch.Tensor, bucket: Bucket | None) -> None:
    end = message.numel() - _CHECKSUM_BYTES
    if message[end:].numpy().tobytes() != _checksum(message[:end]):
        what = "the header" if bucket is None else f"bucket {bucket.index} from rank {bucket.source}"
        raise RemoteProtocolError(f"{what} arrived with a wrong checksum")


def _receive_header(source: int, group: Communicator) -> StateHeader:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], source, _HEADER_TAG).wait()
    num_bytes = int(size.item())
    if not 0 < num_bytes <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(
            f"rank {source} announces a header of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )
    message = torch.empty(num_bytes + _CHECKSUM_BYTES, dtype=torch.uint8)
    group.recv([message], source, _HEADER_TAG).wait()
    _check(message, None)
    try:
        return msgspec.msgpack.decode(message[:num_bytes].numpy().data, type=StateHeader)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"rank {source} sent a header that does not parse: {error}") from error
