"""Checkpoints: the last resort when no live rank holds a shard any more.

Written in torch's distributed checkpoint format (DCP) by a thread, from a copy taken at the end of a step. A
checkpoint counts only when its folder has its final name, which it gets by a rename after the last byte is on disk.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save

from keepstep.errors import RemoteProtocolError
from keepstep.worker.state import tree
from keepstep.worker.state.protected import ProtectedState

# Every rank of a replica group holds the same, so one saves and each loads by itself: nothing to warn about.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

_NAME = re.compile(r"step_(\d{10})")
_KEPT = 2
"""Finished checkpoints kept: the newest, and one before it in case the newest does not load."""


class Checkpoints:
    """The checkpoints of one job in one folder; one rank of each replica group writes them."""

    def __init__(self, state: ProtectedState, directory: Path, every: int) -> None:
        self._state = state
        self._directory = directory
        self._every = every
        self._thread = ThreadPoolExecutor(1, "keepstep-checkpoint")
        self._writing: tuple[Future[Any], Path, Path] | None = None

    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are complete, ascending."""
        self._finish(wait=False)
        if not self._directory.is_dir():
            return ()
        found = (_NAME.fullmatch(entry.name) for entry in self._directory.iterdir())
        return tuple(sorted(int(match.group(1)) for match in found if match))

    def after_step(self, step: int, generation: int) -> None:
        """Begins a checkpoint if one is due at ``step`` and none is being written. Waits for the copy only."""
        self._finish(wait=False)
        if step % self._every or self._writing is not None or step in self.steps():
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for abandoned in self._directory.glob("draft_*"):
            shutil.rmtree(abandoned, ignore_errors=True)  # of a rank that was lost while it wrote
        # The generation is part of the name: what a fenced rank began can never be taken for ours.
        draft = self._directory / f"draft_{step:010d}_generation_{generation}"
        copies = {name: tensor.detach().clone() for name, tensor in checkpoint_content(self._state).items()}
        future = self._thread.submit(save, copies, checkpoint_id=draft, no_dist=True)
        self._writing = (future, draft, self._directory / f"step_{step:010d}")

    def _finish(self, wait: bool) -> None:
        if self._writing is None:
            return
        future, draft, final = self._writing
        if not wait and not future.done():
            return
        self._writing = None
        try:
            future.result()
            if not final.exists():
                draft.rename(final)
        except (OSError, RuntimeError, CheckpointException) as error:
            print(f"keepstep: the checkpoint {final} could not be written: {error}", file=sys.stderr, flush=True)
            shutil.rmtree(draft, ignore_errors=True)
        for old in sorted(entry for entry in self._directory.iterdir() if _NAME.fullmatch(entry.name))[:-_KEPT]:
            shutil.rmtree(old)

    def flush(self) -> None:
        """Waits until the checkpoint being written is complete."""
        self._finish(wait=True)

    def load(self, step: int) -> None:
        """Puts the state of ``step`` into the protected objects.

        Raises:
            RemoteProtocolError: the checkpoint does not fit the objects, or does not load.
        """
        path = self._directory / f"step_{step:010d}"
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        own = checkpoint_content(self._state)
        target = {}
        for name, entry in metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise RemoteProtocolError(f"{path}: '{name}' is not a tensor")
            if name in own and (own[name].shape, own[name].dtype) == (entry.size, entry.properties.dtype):
                target[name] = own[name]
            elif name.startswith(("host", "optimizer/", "gradients")):
                target[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                form = f"shape {tuple(entry.size)}, which this model lacks, or type {entry.properties.dtype}"
                raise RemoteProtocolError(f"{path}: '{name}' has {form}")
        if missing := [name for name in own if name.startswith("model/") and name not in target]:
            raise RemoteProtocolError(f"{path}: lacks {missing[:3]} of this model")
        load_checkpoint(target, checkpoint_id=path, no_dist=True)
        self._place(target)

    def _place(self, loaded: dict[str, torch.Tensor]) -> None:
        self._state.drop_optimizer_state()
        for name, tensor in loaded.items():
            if name.startswith("optimizer/"):
                self._state.place_optimizer_tensor(name.removeprefix("optimizer/"), tensor)
        host = [loaded[f"host/{index}"] for index in range(sum(name.startswith("host/") for name in loaded))]
        plain = msgspec.msgpack.decode(loaded["host"].numpy().tobytes())
        self._state.load_host_state(tree.unpack(plain, host))
        self._state.place_gradients(tuple(loaded["gradients"].tolist()))


def checkpoint_content(state: ProtectedState) -> dict[str, torch.Tensor]:
    """All protected state as named tensors: live ones by reference, the host state as bytes."""
    content = {f"model/{name}": tensor.detach() for name, tensor in (*state.parameters(), *state.buffers())}
    content |= {f"optimizer/{name}": tensor.detach() for name, tensor in state.optimizer_tensors()}
    host, tensors = state.host_bytes()
    content["host"] = torch.frombuffer(bytearray(host), dtype=torch.uint8)
    content["gradients"] = torch.tensor(state.gradient_marks(), dtype=torch.int64)
    return content | {f"host/{index}": tensor for index, tensor in enumerate(tensors)}


def rescue(state: ProtectedState, step: int, rank: int) -> str:
    """Saves this rank's state where nothing else can be: a folder in the working directory. Returns its path."""
    path = tempfile.mkdtemp(prefix=f"keepstep-rescue-step{step}-rank{rank}-", dir=os.getcwd())
    save(checkpoint_content(state), checkpoint_id=path, no_dist=True)
    return path
