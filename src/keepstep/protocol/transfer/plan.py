"""The plan of a transfer: which source sends which blocks of which tensors to which receiver, in which bucket and
order.

The plan is pure: every device computes the same one from the same layout, so none has to send it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keepstep.errors import ConfigurationError, MissingPart
from keepstep.protocol.transfer.boxes import Box, cells

ALIGNMENT_BYTES = 16
"""Alignment of each block in a bucket, so that a tensor of its dtype can be a view of it. complex128 is the largest."""


class TensorForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The form of a whole tensor, the same for all that hold or want parts of it."""

    names: tuple[str, ...]
    """The tensor's name, then the names of tensors tied to it."""
    dtype: str
    """Name of the dtype in torch, without ``torch.``."""
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.names[0]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of one tensor that a device holds or a consumer wants."""

    tensor: int
    """Index of the tensor in the list of tensors."""
    box: Box


class Reader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer that is attached to one device, and the blocks that it wants."""

    device: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A block of one tensor inside a bucket, in row-major order. Offsets and lengths in bytes."""

    tensor: int
    box: Box
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of a transfer: bytes that one source sends to all readers that want them."""

    index: int
    source: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    readers: tuple[int, ...]
    """Indices of the readers; each wants every piece."""
    devices: tuple[int, ...]
    """The devices to which those readers are attached, ascending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of one transfer, in the order in which they are sent."""

    buckets: tuple[Bucket, ...]

    def sent_by(self, source: int) -> tuple[Bucket, ...]:
        """Returns the buckets that one source sends, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.source == source)

    def sent_to(self, device: int) -> tuple[Bucket, ...]:
        """Returns the buckets that one device receives, in order."""
        return tuple(bucket for bucket in self.buckets if device in bucket.devices)


class Limits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sizes by which blocks are packed into buckets."""

    bucket_bytes: int
    """Most bytes of a bucket."""
    lone_bytes: int
    """A block of at least so many bytes gets its own bucket, and need not wait until others fill it."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT_BYTES:
            raise ConfigurationError(
                f"bucket_bytes={self.bucket_bytes}: allowed are sizes of at least {ALIGNMENT_BYTES} bytes"
            )


def plan_transfer(
    tensors: Sequence[TensorForm], holders: Mapping[int, Sequence[Part]], readers: Sequence[Reader], limits: Limits
) -> Plan:
    """Packs the blocks that readers want into buckets, and assigns each bucket to a source that holds it.

    Each tensor is cut along the edges of all held and wanted blocks. So each device holds or wants a block completely
    or not at all, and a block travels once to each device that wants it. Blocks with the same holders and readers share
    buckets. A block that does not fit into a bucket is cut again. Of its holders, the one with the fewest bytes so far
    sends a bucket.

    Args:
        tensors: the tensors to which the indices of parts refer. Their blocks are sent in this order, except that a
            block of `Limits.lone_bytes` may precede smaller blocks, which wait until a bucket is full.
        holders: device or rank of each source -> the parts that it holds.
        readers: the consumers with the parts that they want.
        limits: the sizes of buckets.

    Raises:
        MissingPart: a consumer wants a block that no source holds. The message names the block.
    """
    wanted = _by_tensor(enumerate(reader.parts for reader in readers), len(tensors))
    held = _by_tensor(holders.items(), len(tensors))
    packer = _Packer(readers, limits)
    grids: dict[tuple[_Owned, _Owned], list[_Cell]] = {}  # many layers are cut alike
    for index, form in enumerate(tensors):
        owned = (tuple(held[index]), tuple(wanted[index]))
        if owned not in grids:
            grids[owned] = _wanted_cells(*owned)
        for cell, holding, wanting in grids[owned]:
            if not holding:
                raise MissingPart(
                    f"no source holds '{form.name}' at {list(cell.start)} with shape {list(cell.shape)}, "
                    "which is wanted"
                )
            packer.add(index, form.item_bytes, cell, holding, wanting)
    return packer.finish()


_Owned = tuple[tuple[int, Box], ...]
_Cell = tuple[Box, tuple[int, ...], tuple[int, ...]]
"""(block, its holders, its readers)."""


def _wanted_cells(held: _Owned, wanted: _Owned) -> list[_Cell]:
    grid = cells([box for _owner, box in (*wanted, *held)])
    return [(cell, _owners(cell, held), wanting) for cell in grid if (wanting := _owners(cell, wanted))]


def _by_tensor(owners: Iterable[tuple[int, Sequence[Part]]], num_tensors: int) -> list[list[tuple[int, Box]]]:
    """Returns for each tensor its (owner, box) pairs."""
    found: list[list[tuple[int, Box]]] = [[] for _ in range(num_tensors)]
    for owner, parts in owners:
        for part in parts:
            found[part.tensor].append((owner, part.box))
    return found


def _owners(cell: Box, owned: _Owned) -> tuple[int, ...]:
    return tuple(sorted({owner for owner, box in owned if box.holds(cell)}))


class _Open:
    """A bucket that is being filled."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.num_bytes = 0

    def add(self, tensor: int, box: Box, num_bytes: int) -> None:
        offset = _aligned(self.num_bytes)
        self.pieces.append(Piece(tensor, box, offset, num_bytes))
        self.num_bytes = offset + num_bytes


class _Packer:
    """Fills buckets, and chooses the source of each."""

    def __init__(self, readers: Sequence[Reader], limits: Limits) -> None:
        self._readers, self._limits = readers, limits
        self._buckets: list[Bucket] = []
        self._load: dict[int, int] = {}
        self._open: dict[tuple[tuple[int, ...], tuple[int, ...]], _Open] = {}

    def add(self, tensor: int, item_bytes: int, cell: Box, holding: tuple[int, ...], wanting: tuple[int, ...]) -> None:
        """Packs a block. It cuts a block that does not fit into a bucket."""
        bucket_bytes = self._limits.bucket_bytes
        for box in cell.cut(bucket_bytes // item_bytes):
            num_bytes = box.num_elements * item_bytes
            if num_bytes >= self._limits.lone_bytes:
                lone = _Open()
                lone.add(tensor, box, num_bytes)
                self._close(lone, holding, wanting)
                continue
            key = (holding, wanting)
            shared = self._open.setdefault(key, _Open())
            if _aligned(shared.num_bytes) + num_bytes > bucket_bytes:
                self._close(shared, holding, wanting)
                shared = self._open[key] = _Open()
            shared.add(tensor, box, num_bytes)

    def finish(self) -> Plan:
        """Closes the open buckets, and returns the plan."""
        for (holding, wanting), shared in self._open.items():
            self._close(shared, holding, wanting)
        return Plan(tuple(self._buckets))

    def _close(self, filled: _Open, holding: tuple[int, ...], wanting: tuple[int, ...]) -> None:
        source = min(holding, key=lambda holder: self._load.get(holder, 0))
        self._load[source] = self._load.get(source, 0) + filled.num_bytes
        devices = tuple(sorted({self._readers[reader].device for reader in wanting}))
        self._buckets.append(
            Bucket(len(self._buckets), source, filled.num_bytes, tuple(filled.pieces), wanting, devices)
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
