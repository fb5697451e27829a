"""Checkpoints: the last resort when no live rank holds a shard any more.

Written in torch's distributed checkpoint format (DCP) by a thread, from a copy taken at the end of a step, with the
xxh3 checksum of every file beside it. A checkpoint counts only when its folder has its final name, which it gets by a
rename after the last byte is on disk, and only while its checksums hold.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save

from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.weights.memory.blocks import NamedBlock
from keepstep.worker.state import tree
from keepstep.worker.state.layout import TensorHeader, check_same_layout, check_same_objects, headers_of
from keepstep.worker.state.protected import Modes, ProtectedState

# Every rank of a replica group holds the same, so one saves and each loads by itself: nothing to warn about.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

Content = dict[str, torch.Tensor]

_NAME = re.compile(r"step_(\d{10})")
_KEPT = 2
"""Finished checkpoints kept: the newest, and one before it in case the newest does not load."""
_CHECKSUMS = "checksums"
"""A line for each of torch's files, as xxh128sum(1) writes and checks them: ``xxh128sum --check checksums``."""
_LIVE = ("model/", "optimizer/")
"""Tensors that are read into the live objects; all others are small."""


class Checkpoints:
    """The checkpoints of one job in one folder; one rank of each replica group writes them."""

    def __init__(self, state: ProtectedState, directory: Path, every: int) -> None:
        """Raises:
        ConfigurationError: there is no such folder, and none can be made there.
        """
        self._state = state
        self._directory = directory.absolute()
        _check_folder(self._directory)
        self._every = every
        self._thread = ThreadPoolExecutor(1, "keepstep-checkpoint")
        self._writing: tuple[Future[None], Path, int] | None = None
        self._damaged: set[int] = set()
        """Steps of checkpoints that turned out not to be readable here; they stay where they are, and do not count."""
        self._failing = False
        self._is_ending = False
        """The job is being drained: a checkpoint that cannot be written now is not due again."""

    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that seem to be whole, ascending; without those known to be damaged. Reads none."""
        self._finish(wait=False)
        return self._found()

    def inspect(self) -> None:
        """Reads the newest checkpoint in full, and older ones until one is intact.

        They may have lain there for long, and a rank that has just started with all others has no other state.

        Raises:
            ConfigurationError: there are checkpoints, and not one of them is intact.
        """
        named = self._named()
        for step in reversed(named):
            try:
                _verify(self._path(step))
                return
            except (OSError, RemoteProtocolError) as error:
                if self._path(step).exists():  # else it was removed meanwhile: there is a newer one
                    self._damaged.add(step)
                    _say(f"{error}; the checkpoint of step {step} is left out")
        if named and self._damaged.issuperset(named):
            raise ConfigurationError(
                f"checkpoint_dir {self._directory}: none of its {len(named)} checkpoints is intact; "
                "move them away to begin at step 0"
            )

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:010d}"

    def _found(self) -> tuple[int, ...]:
        """Steps of the checkpoints that seem to be whole, ascending; those known to be damaged do not."""
        hopeful = [step for step in self._named() if step not in self._damaged]
        return tuple(step for step in hopeful if os.path.isfile(self._path(step) / _CHECKSUMS))

    def _named(self) -> list[int]:
        try:
            entries = [entry.name for entry in self._directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._complain(f"the checkpoints in {self._directory} cannot be listed: {error}")
            return []
        return sorted(int(match.group(1)) for entry in entries if (match := _NAME.fullmatch(entry)))

    # ---- writing --------------------------------------------------------------------------------------------------

    def after_step(self, step: int, generation: int) -> None:
        """Begins a checkpoint if one is due at ``step`` and none is being written. Waits for the copy only.

        A checkpoint that cannot be written does not end the training: the user is told, and the next one is tried.
        """
        self._finish(wait=False)
        if step % self._every == 0 and self._writing is None:
            self._begin(step, generation)

    def write_now(self, step: int, generation: int) -> bool:
        """The job ends at ``step``: writes a checkpoint of it, and waits for it. Says whether there is one."""
        self._is_ending = True
        self._finish(wait=True)
        self._begin(step, generation)
        self._finish(wait=True)
        return step in self._found()

    def _begin(self, step: int, generation: int) -> None:
        if step in self._found():
            return
        # The generation is part of the name: what a fenced rank began can never be taken for ours.
        draft = self._directory / f"draft_{step:010d}_generation_{generation}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for abandoned in self._directory.glob("draft_*"):
                shutil.rmtree(abandoned, ignore_errors=True)  # of a rank that was lost while it wrote
            copies = {name: tensor.detach().clone() for name, tensor in checkpoint_content(self._state).items()}
        except (OSError, RuntimeError) as error:  # torch's RuntimeError: no memory for the copy
            self._could_not_write(step, error)
            return
        self._writing = (self._thread.submit(self._write_and_name, copies, draft, step), draft, step)

    def _write_and_name(self, copies: Content, draft: Path, step: int) -> None:
        """Writes it and lets it count as soon as it is on disk. Runs in the writer's thread."""
        _write(copies, draft)
        self._give_name(draft, step)
        for old in self._found()[:-_KEPT]:
            self._remove(old)

    def _finish(self, wait: bool) -> None:
        if self._writing is None:
            return
        future, draft, step = self._writing
        if not wait and not future.done():
            return
        self._writing = None
        try:
            future.result()
        except (OSError, RuntimeError) as error:
            self._could_not_write(step, error)
            shutil.rmtree(draft, ignore_errors=True)
            return
        if self._failing:
            self._failing = False
            _say(f"checkpoints are written again: {self._path(step)}")

    def _give_name(self, draft: Path, step: int) -> None:
        if step in self._found():
            shutil.rmtree(draft)
            return
        if self._path(step).exists():
            self._remove(step)  # a damaged one
        draft.rename(self._path(step))
        self._damaged.discard(step)

    def _remove(self, step: int) -> None:
        """Takes the name away first, so that no rank finds a checkpoint that is half removed."""
        nameless = self._directory / f"draft_{step:010d}_removed"
        self._path(step).rename(nameless)
        shutil.rmtree(nameless)

    def _could_not_write(self, step: int, error: Exception) -> None:
        what = f"the checkpoint {self._path(step)} could not be written: {error}"
        if not self._is_ending:
            self._complain(
                f"{what}. Training goes on, and every {self._every} steps it is tried again; this is said once"
            )
            return
        found = self._found()
        self._failing = True
        _say(f"{what}. The job is to end, and {f'its newest one is of step {found[-1]}' if found else 'there is none'}")

    def _complain(self, text: str) -> None:
        if not self._failing:
            self._failing = True
            _say(text)

    def flush(self) -> None:
        """Waits until the checkpoint being written is complete."""
        self._finish(wait=True)

    # ---- loading --------------------------------------------------------------------------------------------------

    def load(self, step: int) -> None:
        """Puts the state of ``step`` into the protected objects.

        Raises:
            StateMismatch: it is of other objects than these, which have not been touched.
            RemoteProtocolError: it is damaged, or cannot be read. From now on `steps` leaves it out, so that the next
                attempt takes an older one.
        """
        path = self._path(step)
        try:
            _verify(path)
            aside = _read_aside(path)
            live = self._targets(aside, path)
            load_checkpoint(live, checkpoint_id=path, no_dist=True)
        except (OSError, RuntimeError, CheckpointException, RemoteProtocolError) as error:
            self._damaged.add(step)
            raise RemoteProtocolError(f"the checkpoint {path} cannot be loaded: {_cause(error)}") from error
        self._state.drop_optimizer_state()
        for name, tensor in live.items():
            if name.startswith("optimizer/"):
                self._state.place_optimizer_tensor(name.removeprefix("optimizer/"), tensor)
        self._state.load_host_state(_host_state(aside))
        self._state.place_gradients(tuple(aside["gradients"].tolist()))
        self._state.place_modes(msgspec.msgpack.decode(aside["modes"].numpy().tobytes(), type=Modes))

    def _targets(self, aside: Content, path: Path) -> Content:
        """The tensors to read into: live ones, and optimizer state that is not there yet in its own order of memory."""
        headers = msgspec.msgpack.decode(aside["layout"].numpy().tobytes(), type=tuple[TensorHeader, ...])
        own = _live_content(self._state)
        forms = {header.name: header for header in headers_of(_live_blocks(self._state))}
        try:
            check_same_objects(self._state, _host_state(aside), str(path))
            check_same_layout(_of_model(forms.values()), _of_model(headers), str(path))
        except StateMismatch as error:
            advice = "start with what wrote the checkpoint, or give another checkpoint_dir"
            raise StateMismatch(f"{error}; {advice}") from error
        return {
            header.name: own[header.name] if forms.get(header.name) == header else header.empty() for header in headers
        }


def checkpoint_content(state: ProtectedState) -> Content:
    """All protected state as named tensors: live ones by reference, the host state as bytes."""
    content = _live_content(state)
    layout = headers_of(_live_blocks(state))
    host, tensors = state.host_bytes()
    content["layout"] = _as_tensor(msgspec.msgpack.encode(layout))
    content["host"] = _as_tensor(host)
    content["modes"] = _as_tensor(msgspec.msgpack.encode(state.modes()))
    content["gradients"] = torch.tensor(state.gradient_marks(), dtype=torch.int64)
    return content | {f"host/{index}": tensor for index, tensor in enumerate(tensors)}


def rescue(state: ProtectedState, step: int, rank: int) -> str:
    """Saves this rank's state where nothing else can be: a folder in the working directory. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    path = tempfile.mkdtemp(prefix=f"keepstep-rescue-step{step}-rank{rank}-", dir=os.getcwd())
    _write(checkpoint_content(state), Path(path))
    return path


def _check_folder(directory: Path) -> None:
    standing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not standing.is_dir():
        raise ConfigurationError(f"checkpoint_dir {directory}: {standing} is not a folder; give another checkpoint_dir")
    wanted = os.W_OK | os.X_OK | (os.R_OK if standing == directory else 0)
    if not os.access(standing, wanted):
        raise ConfigurationError(
            f"checkpoint_dir {directory}: this process has no right to write in {standing}; "
            "change its permissions or give another checkpoint_dir"
        )


def _live_content(state: ProtectedState) -> Content:
    return {block.names[0]: block.held.tensor for block in _live_blocks(state)}


def _live_blocks(state: ProtectedState) -> list[NamedBlock]:
    model = [(f"model/{name}", tensor) for name, tensor in (*state.parameters(), *state.buffers())]
    optimizer = [(f"optimizer/{name}", tensor) for name, tensor in state.optimizer_tensors()]
    return state.layout.blocks([*model, *optimizer])


def _of_model(headers: Iterable[TensorHeader]) -> list[TensorHeader]:
    return [header for header in headers if header.name.startswith("model/")]


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _host_state(aside: Content) -> dict[str, Any]:
    tensors = [aside[f"host/{index}"] for index in range(sum(name.startswith("host/") for name in aside))]
    state: dict[str, Any] = tree.unpack(msgspec.msgpack.decode(aside["host"].numpy().tobytes()), tensors)
    return state


# ---- on disk --------------------------------------------------------------------------------------------------------


def _write(content: Content, path: Path) -> None:
    """Writes a checkpoint and its checksums.

    Raises:
        OSError: it could not be written.
    """
    try:
        save(content, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise OSError(_cause(error)) from error
    lines = [f"{checksum}  {name}\n" for name, checksum in _checksums(path).items()]
    with (path / _CHECKSUMS).open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _checksums(path: Path) -> dict[str, str]:
    """xxh3 of each of torch's files in a checkpoint, by name."""
    found = {}
    for file in sorted(path.iterdir()):
        if file.name == ".metadata" or file.suffix == ".distcp":
            with file.open("rb") as content:
                found[file.name] = hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()
    return found


def _verify(path: Path) -> None:
    """Compares every file with its checksum, before torch reads them: it unpickles the metadata.

    Raises:
        RemoteProtocolError: names a file that is not as it was written.
        OSError: a file cannot be read.
    """
    lines = (path / _CHECKSUMS).read_text(errors="replace").splitlines()
    written = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    found = _checksums(path)
    wrong = sorted(name for name in {*written, *found} if written.get(name) != found.get(name))
    if wrong or not written:
        name = wrong[0] if wrong else _CHECKSUMS
        raise RemoteProtocolError(f"{path / name} is damaged or gone: it is not what '{_CHECKSUMS}' beside it says")


def _read_aside(path: Path) -> Content:
    """Everything but the live tensors, in memory of its own."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    aside = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(_LIVE)
    }
    load_checkpoint(aside, checkpoint_id=path, no_dist=True)
    return aside


def _cause(error: BaseException) -> str:
    """What went wrong, in one line: torch's exception prints a whole traceback."""
    if isinstance(error, CheckpointException):
        return "; ".join(str(failure) or type(failure).__name__ for failure, _trace in error.failures.values())
    return str(error)


def _say(text: str) -> None:
    # Not a warning: under -W error it would end the training. In one piece: other ranks say the same at the same time.
    sys.stderr.write(f"keepstep: {text}\n")
