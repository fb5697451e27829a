"""Writes a checkpoint: one rank writes each shard, and the rank that finishes last completes it.

Every rank writes torch's files for its part into the same folder. Then it publishes a file that describes them, by a
rename, and checks whether all parts exist. So at least one rank finds all parts, without messages, clocks or waiting.
If several ranks do, an exclusively created file selects one. That rank completes the checkpoint: it writes torch's
merged metadata and the checksum of every file. If a rank is lost, the folder lacks these files and is no checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from keepstep.errors import StateMismatch
from keepstep.worker.state.dcp.content import Content, HostState, Share, digest_of_tensor
from keepstep.worker.state.layout import TensorHeader
from keepstep.worker.state.protected import Modes

CHECKSUMS = "checksums"
"""A line for each file, as xxh128sum(1) writes and checks them: ``xxh128sum --check checksums``."""
CONTENT = "content.msgpack"
"""A serialized `Content`: the part of a checkpoint that DCP does not cover."""
METADATA = ".metadata"
_CLAIM = "completing"


class WrittenPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of one rank's part, written when the part is on disk."""

    rank: int
    content: Content
    digests: tuple[bytes, ...]
    """Of its tensors."""
    checksums: dict[str, str]
    """Name -> checksum of torch's files in the part."""


def write_part(content: Content, tensors: dict[str, torch.Tensor], folder: Path, share: Share) -> None:
    """Writes this rank's part, then the file that describes it.

    Raises:
        OSError: the part could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(False, rank=share.rank, use_collectives=False)
    own_plan = SavePlan([_item(header) for header in content.tensors if header.num_elements])
    plan = writer.prepare_global_plan([SavePlan([])] * share.rank + [own_plan])[-1]  # has files named after the rank
    results = writer.write_data(plan, _Copies(tensors)).wait()
    _plans, metadata = create_default_global_save_plan([plan])
    writer.finish(metadata, [results])
    own = [*folder.glob(f"__{share.rank}_*"), folder / _own_metadata(share.rank)]
    # No digests if no other rank writes: there is nothing to compare.
    digests = tuple(b"" if share.is_all else digest_of_tensor(tensors[header.name]) for header in content.tensors)
    part = WrittenPart(share.rank, content, digests, {file.name: checksum_of(file) for file in own})
    draft = folder / f"part_{share.rank}.draft"
    _write_synced(draft, msgspec.msgpack.encode(part))
    draft.rename(folder / _part(content.hosts[0].shards[0]))


def complete(folder: Path, shards: Iterable[str]) -> bool:
    """Completes the checkpoint if all parts exist and no other rank completes it.

    Args:
        folder: the folder with the parts.
        shards: names of all shards of the job.

    Returns:
        whether this rank has completed the checkpoint.

    Raises:
        OSError: a file could not be written, or a part differs from its checksum.
        StateMismatch: the parts do not form one state.
    """
    files = [folder / _part(shard) for shard in shards]
    if not all(file.exists() for file in files):
        return False
    try:
        (folder / _CLAIM).touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):  # another rank is completing it, or has done so and renamed the folder
        return False
    merged = _Merged(folder)
    for file in files:
        merged.add(msgspec.msgpack.decode(file.read_bytes(), type=WrittenPart))
    checksums = merged.write()
    for file in [*files, *(folder / _own_metadata(rank) for rank in merged.ranks)]:
        file.unlink()
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(checksums.items()))
    _write_synced(folder / CHECKSUMS, lines.encode())
    (folder / _CLAIM).unlink()
    _sync(folder)
    return True


def _joined(one: Modes, other: Modes) -> Modes:
    """The union of two ranks' modes. Parameters that the script writes to are known only if both ranks know them."""
    is_known = one.written is not None and other.written is not None
    written = (one.written or frozenset()) | (other.written or frozenset()) if is_known else None
    return Modes(
        one.evaluating | other.evaluating,
        one.frozen | other.frozen,
        written,
        one.without_tensor | other.without_tensor,
        one.transient | other.transient,
    )


def checksum_of(file: Path) -> str:
    """xxh3 (128 bit) of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


class _Copies(DefaultSavePlanner):
    """Gives torch's writer the tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


class _Merged:
    """All parts as one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ranks: list[int] = []
        self._tensors: dict[str, TensorHeader] = {}
        self._entries: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, object] = {}
        self._held: dict[MetadataIndex, tuple[int, bytes]] = {}
        """For each block, the first rank that holds it, and its digest."""
        self._hosts: dict[tuple[bytes, tuple[bytes, ...]], HostState] = {}
        self._content = Content((), (), {}, (), Modes(*[frozenset()] * 5), ())
        self._checksums: dict[str, str] = {}

    def add(self, part: WrittenPart) -> None:
        """Adds the blocks and host states that no earlier part has."""
        name = _own_metadata(part.rank)
        if checksum_of(self._folder / name) != part.checksums[name]:  # before torch unpickles it
            raise OSError(f"{self._folder / name} is not what rank {part.rank} has written")
        metadata = FileSystemReader(self._folder).read_metadata(rank=part.rank)
        host = self._add_host(part)
        for header, digest in zip(part.content.tensors, part.digests, strict=True):
            if header.name.startswith("host/") and header.name not in host.packed.tensors:
                continue  # another part has the same host state
            self._add_tensor(part.rank, header, digest, metadata)
        before, own = self._content, part.content
        self._content = Content(
            (),
            (),
            before.scalars | own.scalars,
            tuple(dict.fromkeys((*before.with_gradient, *own.with_gradient))),
            _joined(before.modes, own.modes),
            tuple(dict.fromkeys((*before.buffers, *own.buffers))),
        )
        self.ranks.append(part.rank)
        self._checksums |= {file: checksum for file, checksum in part.checksums.items() if file != name}

    def _add_host(self, part: WrittenPart) -> HostState:
        [host] = part.content.hosts
        digests = dict(zip((header.name for header in part.content.tensors), part.digests, strict=True))
        key = (host.packed.plain, tuple(digests[name] for name in host.packed.tensors))
        known = self._hosts.get(key, msgspec.structs.replace(host, shards=()))
        self._hosts[key] = msgspec.structs.replace(known, shards=(*known.shards, *host.shards))
        return self._hosts[key]

    def _add_tensor(self, rank: int, header: TensorHeader, digest: bytes, metadata: Metadata) -> None:
        name, index = header.name, MetadataIndex(header.name, header.start)
        known = self._tensors.setdefault(name, header)
        if (known.dtype, known.whole) != (header.dtype, header.whole):
            raise StateMismatch(f"'{name}' is {known.form(False)} on one rank and {header.form(False)} on rank {rank}")
        entry = self._entries.setdefault(name, TensorStorageMetadata(_properties(header), torch.Size(header.whole), []))
        if not header.num_elements:
            return
        if index not in self._held:
            self._held[index] = (rank, digest)
            self._storage[index] = metadata.storage_data[index]
            entry.chunks.append(ChunkStorageMetadata(torch.Size(header.start), torch.Size(header.shape)))
        elif self._held[index][1] != digest:
            raise StateMismatch(
                f"'{name}' differs between ranks {self._held[index][0]} and {rank}, and a checkpoint has one tensor of "
                'a name: protect(shard="...") with another text for each part tells them apart'
            )

    def write(self) -> dict[str, str]:
        """Writes the merged description; returns the checksums of all files."""
        for name, entry in self._entries.items():
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise StateMismatch(f"the ranks' blocks of '{name}' are not the whole of it, each part once")
        metadata = Metadata(dict(self._entries), planner_data={name: (name,) for name in self._entries})
        FileSystemWriter(self._folder).finish(
            metadata, [[WriteResult(index, 0, place) for index, place in self._storage.items()]]
        )
        content = msgspec.structs.replace(
            self._content, tensors=tuple(self._tensors.values()), hosts=tuple(self._hosts.values())
        )
        _write_synced(self._folder / CONTENT, msgspec.msgpack.encode(content))
        return self._checksums | {name: checksum_of(self._folder / name) for name in (METADATA, CONTENT)}


def _item(header: TensorHeader) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(header.start), torch.Size(header.shape))
    data = TensorWriteData(chunk, _properties(header), torch.Size(header.whole))
    return WriteItem(MetadataIndex(header.name, header.start), WriteItemType.SHARD, tensor_data=data)


def _properties(header: TensorHeader) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, header.dtype))


def _part(shard: str) -> str:
    return f"part_{shard}"


def _own_metadata(rank: int) -> str:
    """The file name that torch's writer uses if each rank writes its own metadata."""
    return f"__{rank}{METADATA}"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flushes a folder's directory entries to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
