"""Reads a checkpoint: each rank reads the blocks that it holds, even if other blocks were written.

Every file that is read is compared with its checksum first: torch unpickles the metadata.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from keepstep.errors import RemoteProtocolError, StateMismatch
from keepstep.protocol.transfer.boxes import Box, whole
from keepstep.weights.memory.blocks import NamedBlock, is_dtensor
from keepstep.worker.state.dcp.content import Content, SavedNames
from keepstep.worker.state.dcp.writing import CHECKSUMS, CONTENT, METADATA, checksum_of
from keepstep.worker.state.layout import (
    TensorHeader,
    check_restored,
    check_same_layout,
    check_same_objects,
    headers_of,
)
from keepstep.worker.state.protected import ProtectedState


class SavedCheckpoint:
    """A checkpoint on disk. Creating the object reads only the metadata."""

    def __init__(self, path: Path) -> None:
        """Raises:
        RemoteProtocolError: a file does not match its checksum, or another version of keepstep has written it.
        OSError: a file cannot be read.
        """
        self._path = path
        lines = (path / CHECKSUMS).read_text(errors="replace").splitlines()
        self._written = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        self._verify((METADATA, CONTENT))
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._entries = metadata.state_dict_metadata
        try:
            self.content = msgspec.msgpack.decode((path / CONTENT).read_bytes(), type=Content)
        except msgspec.ValidationError as error:
            raise RemoteProtocolError(
                f"{path / CONTENT} has another form than this version of keepstep writes ({error}): load it with the "
                "version that has written it"
            ) from error

    def _verify(self, names: Iterable[str]) -> None:
        for name in names:
            file = self._path / name
            if not file.exists() or checksum_of(file) != self._written.get(name):
                raise RemoteProtocolError(f"{file} is damaged or gone: it is not what '{CHECKSUMS}' beside it says")

    def verify(self, wanted: Mapping[str, Box] | None = None) -> None:
        """Verifies the checksums of the files that hold the blocks in ``wanted``; by default, of all files.

        Raises:
            RemoteProtocolError: a file does not match its checksum; the message names the file.
            OSError: a file cannot be read.
        """
        files = set(self._written)
        if wanted is not None:
            places = [self._reader.storage_data[item.storage_index] for item in self._items(wanted)]
            files = {place.relative_path for place in places}
        self._verify(sorted(files))

    def read(self, wanted: Mapping[str, tuple[Box, torch.Tensor]]) -> None:
        """Reads blocks into tensors.

        Raises:
            OSError, RuntimeError: they cannot be read.
        """
        into = _Into({name: tensor for name, (_box, tensor) in wanted.items()})
        items = self._items({name: box for name, (box, _tensor) in wanted.items()})
        self._reader.read_data(self._reader.prepare_local_plan(LoadPlan(items)), into).wait()

    def _items(self, wanted: Mapping[str, Box]) -> list[ReadItem]:
        return [item for name, box in wanted.items() for item in self._items_of(name, box)]

    def _items_of(self, name: str, box: Box) -> list[ReadItem]:
        entry = self._entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        items = create_read_items_for_chunk_list(name, entry, [chunk]) if math.prod(box.shape) else []
        if sum(math.prod(item.lengths) for item in items) != math.prod(box.shape):
            raise RemoteProtocolError(f"{self._path} lacks a part of '{name}'")
        return items


class _Into(DefaultLoadPlanner):
    """Gives torch's reader the tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """One tensor of a checkpoint in the form in which this rank will hold it."""

    header: TensorHeader
    live: torch.Tensor | None
    """The tensor to read into; None allocates a new one."""


class StateReader:
    """Loads a checkpoint into a rank's protected state."""

    def __init__(self, state: ProtectedState, saved: SavedCheckpoint, source: str) -> None:
        """Args:
        state: protected state of this rank. It does not change before `load`.
        saved: the checkpoint.
        source: name of the checkpoint, for messages.

        Raises:
            StateMismatch: the checkpoint does not match the protected objects.
            RemoteProtocolError: the checkpoint cannot be parsed.
        """
        self._state, self._saved = state, saved
        self._names = SavedNames(state)
        content = saved.content
        self._headers = {header.name: header for header in content.tensors}
        host = content.host_of(state.shard())
        if host is None:
            raise StateMismatch(
                f"{source} has different host values for each of its shards, and none for this rank's: the layout "
                "and the number of ranks must be those that wrote it"
            )
        self._host = host.packed
        forms = {name: torch.empty(0) for name in self._host.tensors}
        check_same_objects(state, self._host.unpacked(forms), source)
        self._buffers = self._names.buffers_here(content.buffers)
        self._check_model(source)
        scalars = (packed for name, packed in content.scalars.items() if name in self._names.indices)
        others = [name for packed in (self._host, *scalars) for name in packed.tensors]
        self._wanted = self._live() | self._optimizer(source)
        self._wanted |= {name: _Wanted(_as_whole(self._headers[name]), None) for name in others}

    def _check_model(self, source: str) -> None:
        """The tensors of modules must have the same names, dtypes and whole shapes; the blocks may differ."""
        own = _models(headers_of(self._names.live_blocks()))
        theirs = _models(self._headers.values())
        saved = {f"model/{name}" for name in self._saved.content.buffers}
        mine = {f"model/{self._names.of(name)}": name for name, _buffer in self._state.buffers()}
        for name in saved & mine.keys():  # a forward may create and resize them
            if own[name].dtype == theirs[name].dtype and not (own[name].is_dtensor or theirs[name].is_dtensor):
                del own[name], theirs[name]
        for name in (saved & theirs.keys()) - mine.keys():
            if self._buffers.get(name.removeprefix("model/")) is not None:
                del theirs[name]
        none = {f"model/{name}" for name in self._saved.content.modes.without_tensor}
        for name in mine.keys() & own.keys():
            if name in none or mine[name] not in self._state.first_buffers:
                own.pop(name)
        if self._state.has_stages or self._state.label:  # each rank holds only some of the tensors
            theirs = {name: header for name, header in theirs.items() if name in own}
        order = dict.fromkeys((*theirs, *own))  # the order of the stages in the checkpoint does not matter
        check_same_layout([own[name] for name in order if name in own], list(theirs.values()), source)

    def _live(self) -> dict[str, _Wanted]:
        """Parameters and buffers. A buffer of another form than here is read into new memory."""
        blocks = self._state.layout.blocks(
            [(f"model/{self._names.of(name)}", t) for name, t in (*self._state.parameters(), *self._state.buffers())]
        )
        found = {
            block.names[0]: _Wanted(header, block.held.tensor)
            for block, header in zip(blocks, headers_of(blocks), strict=True)
        }
        buffers = {f"model/{self._names.of(name)}" for name, _buffer in self._state.buffers()}
        for name in buffers - {f"model/{name}" for name in self._buffers}:
            del found[name]
        for saved in (self._headers[f"model/{name}"] for name in self._buffers):
            if saved.name not in found or found[saved.name].header.whole != saved.whole:
                found[saved.name] = _Wanted(_as_whole(saved), None)
        return found

    def _optimizer(self, source: str) -> dict[str, _Wanted]:
        """Optimizer state of this rank's parameters. If it was sharded like its parameter, it is again."""
        existing = {block.names[0]: block for block in self._names.live_blocks()}
        forms = {header.name: header for header in headers_of(existing.values())}
        found = {}
        for saved in self._headers.values():
            if not saved.name.startswith("optimizer/"):
                continue
            place = saved.name.removeprefix("optimizer/").rpartition("/")[0]
            if place in self._names.indices:
                header = self._cut(saved, self._names.parameters[place], place)
                live = existing[saved.name].held.tensor if forms.get(saved.name) == header else None
                found[saved.name] = _Wanted(header, live)
            elif place not in self._names.parameters and not (self._state.has_stages or self._state.label):
                raise StateMismatch(f"{source} has '{saved.name}', whose parameter no optimizer of this rank has")
        return found

    def _cut(self, saved: TensorHeader, parameter: torch.Tensor, place: str) -> TensorHeader:
        """The block of an optimizer's tensor that this rank holds."""
        [block] = self._state.layout.blocks([(place, parameter)])
        model = self._headers.get(f"model/{place.partition('/')[2]}")
        was_whole = model is not None and not model.is_dtensor
        lies_as_parameter = saved.whole == block.whole and (saved.is_dtensor or (was_whole and saved.whole != ()))
        if is_dtensor(parameter) and saved.is_dtensor and not lies_as_parameter:
            raise StateMismatch(
                f"'{saved.name}' is sharded in another way than its parameter: such state cannot be restored"
            )
        return _block(saved, block) if lies_as_parameter else _as_whole(saved)

    def verify(self) -> None:
        """Verifies the checksums of all files that `load` reads. See `SavedCheckpoint.verify`."""
        self._saved.verify({name: wanted.header.box for name, wanted in self._wanted.items()})

    def load(self) -> None:
        """Reads the checkpoint into the protected state.

        Raises:
            RemoteProtocolError, OSError, RuntimeError: the checkpoint cannot be read.
        """
        device = self._state.device
        tensors = {name: w.header.empty(device) if w.live is None else w.live for name, w in self._wanted.items()}
        self._saved.read({name: (wanted.header.box, tensors[name]) for name, wanted in self._wanted.items()})
        state, content = self._state, self._saved.content
        state.drop_optimizer_state()
        placed = []
        for name, wanted in self._wanted.items():
            if name.startswith("optimizer/"):
                place, _, key = name.removeprefix("optimizer/").rpartition("/")
                indexed = f"{self._names.indices[place]}/{key}"
                state.place_optimizer_tensor(indexed, tensors[name], as_dtensor=wanted.header.is_dtensor)
                placed.append(indexed)
        modes = self._names.modes_here(content.modes)
        saved = {own: f"model/{name}" for name, own in self._buffers.items()}
        new = {own: tensors[name] for own, name in saved.items() if self._wanted[name].live is None}
        state.place_buffers(saved, new, modes)
        host: dict[str, Any] = self._host.unpacked(tensors) | {"scalars": self._names.scalars_here(content, tensors)}
        state.load_host_state(host)
        state.place_gradients(self._names.gradients_here(content.with_gradient))
        state.place_modes(modes)
        check_restored(state, host, placed)


def _models(headers: Iterable[TensorHeader]) -> dict[str, TensorHeader]:
    """Headers of modules' whole tensors, without strides and device: torch copies between any of these."""
    wholes = (_as_whole(header) for header in headers if header.name.startswith("model/"))
    return {header.name: msgspec.structs.replace(header, strides=(), device="cpu") for header in wholes}


def _as_whole(header: TensorHeader) -> TensorHeader:
    """The header of the whole tensor of a block, with dimensions in the same memory order."""
    return _cut_out(header, whole(header.whole), is_part=False)


def _block(header: TensorHeader, block: NamedBlock) -> TensorHeader:
    cut = _cut_out(header, block.held.box, is_part=is_dtensor(block.owners[0]))
    return msgspec.structs.replace(cut, device=block.held.tensor.device.type)


def _cut_out(header: TensorHeader, box: Box, *, is_part: bool) -> TensorHeader:
    strides = list(header.strides)
    if box.shape != header.shape:
        step = 1
        for dim in sorted(range(len(box.shape)), key=lambda dim: (header.strides[dim], -dim)):
            strides[dim], step = step, step * box.shape[dim]
    return msgspec.structs.replace(header, shape=box.shape, strides=tuple(strides), start=box.start, is_dtensor=is_part)
