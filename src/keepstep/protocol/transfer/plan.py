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
"""Of each block in a bucket, so that it can be looked at as a tensor of its dtype; complex128 is the largest one."""


class TensorForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor, as all who hold or want parts of it see it."""

    names: tuple[str, ...]
    """The first is its name; the others are those of tensors tied to it."""
    dtype: str
    """As torch calls it, without ``torch.``."""
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.names[0]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of one tensor that a device holds or a consumer wants."""

    tensor: int
    """Its index in the list of tensors."""
    box: Box


class Reader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A consumer on one device, and what it wants."""

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
    """What moves at a time, from one source to all who want it."""

    index: int
    source: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    readers: tuple[int, ...]
    """Indices of the readers; each wants every piece."""
    devices: tuple[int, ...]
    """Where those readers are, ascending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of one transfer, in the order in which they move."""

    buckets: tuple[Bucket, ...]

    def sent_by(self, source: int) -> tuple[Bucket, ...]:
        """The buckets of one source, in their order."""
        return tuple(bucket for bucket in self.buckets if bucket.source == source)

    def sent_to(self, device: int) -> tuple[Bucket, ...]:
        """The buckets that come to one device, in their order."""
        return tuple(bucket for bucket in self.buckets if device in bucket.devices)


class Limits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How buckets are filled."""

    bucket_bytes: int
    """The upper bound of a bucket."""
    lone_bytes: int
    """A block of at least so many bytes gets a bucket of its own: it need not wait for others to fill it."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT_BYTES:
            raise ConfigurationError(
                f"bucket_bytes={self.bucket_bytes}: allowed are sizes of at least {ALIGNMENT_BYTES} bytes"
            )


def plan_transfer(
    tensors: Sequence[TensorForm], holders: Mapping[int, Sequence[Part]], readers: Sequence[Reader], limits: Limits
) -> Plan:
    """Cuts what the readers want into buckets and deals them out to those who hold it.

    Each tensor is cut along the edges of everything held and wanted, so that a block is held or wanted as a whole or
    not at all, and travels once to each device that wants it. Blocks with the same holders and readers share buckets;
    what does not fit into one is cut again. Each bucket goes to that holder of it that has the fewest bytes so far.

    Args:
        tensors: as parts count them. They move in this order, except blocks that need not wait for a bucket to fill.
        holders: what each source holds, by its device or rank.
        readers: what each consumer wants.
        limits: how buckets are filled.

    Raises:
        MissingPart: a consumer wants a block that no source holds; the message names it.
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
"""A block, who holds it, and who wants it."""


def _wanted_cells(held: _Owned, wanted: _Owned) -> list[_Cell]:
    grid = cells([box for _owner, box in (*wanted, *held)])
    return [(cell, _owners(cell, held), wanting) for cell in grid if (wanting := _owners(cell, wanted))]


def _by_tensor(owners: Iterable[tuple[int, Sequence[Part]]], num_tensors: int) -> list[list[tuple[int, Box]]]:
    """For each tensor: (owner, box)."""
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
    """Fills buckets and deals them out."""

    def __init__(self, readers: Sequence[Reader], limits: Limits) -> None:
        self._readers, self._limits = readers, limits
        self._buckets: list[Bucket] = []
        self._load: dict[int, int] = {}
        self._open: dict[tuple[tuple[int, ...], tuple[int, ...]], _Open] = {}

    def add(self, tensor: int, item_bytes: int, cell: Box, holding: tuple[int, ...], wanting: tuple[int, ...]) -> None:
        """Takes a block in, cut where it does not fit into a bucket."""
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
        """The plan, with what was still open."""
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
