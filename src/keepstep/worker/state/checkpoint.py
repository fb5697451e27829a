"""Checkpoints: the last resort when no live rank holds a shard any more.

A thread writes them in torch's distributed checkpoint format (DCP), from a copy of the state at the end of a step, with
the xxh3 checksum of every file. One rank writes each shard; all ranks write into the same folder. A checkpoint is valid
only if its folder has its final name and its checksums match. The folder gets its final name by a rename after the last
rank's last byte is on disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from keepstep.config import RESCUE_PREFIX
from keepstep.errors import ConfigurationError, RemoteProtocolError, StateMismatch
from keepstep.procfs import start_of
from keepstep.worker.state.dcp.content import Content, Share, describe
from keepstep.worker.state.dcp.reading import SavedCheckpoint, StateReader
from keepstep.worker.state.dcp.writing import CHECKSUMS, complete, write_part
from keepstep.worker.state.protected import ProtectedState

ALONE = Share()
"""The share of a rank that writes the whole checkpoint."""
_NAME = re.compile(r"step_(\d{10})")
_KEPT = 2
"""Finished checkpoints kept: the newest, and one before it in case the newest does not load."""


class Checkpoints:
    """The checkpoints of one job in one folder; one rank of each replica group writes them."""

    def __init__(self, state: ProtectedState, directory: Path, every: int) -> None:
        """Raises:
        ConfigurationError: the folder does not exist and cannot be created, or this process cannot write to it.
        """
        self._state = state
        self._directory = directory.absolute()
        _check_folder(self._directory)
        self._every = every
        self._thread = ThreadPoolExecutor(1, "keepstep-checkpoint")
        self._writing: tuple[Future[None], int] | None = None
        self._written: tuple[int, int] | None = None
        """The step and generation of the part that was begun last."""
        self._damaged: set[int] = set()
        """Steps of checkpoints that this rank could not read. Their folders stay, but `steps` leaves them out."""
        self._failing = False
        self._news: int | None = None
        self._is_ending = False
        """Whether the job is ending. A checkpoint that cannot be written now will then not be tried again."""

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints that are not known to be damaged, ascending. It reads no file contents."""
        self._finish(wait=False)
        return self._found()

    def inspect(self) -> None:
        """Verifies this rank's part of the newest checkpoint; if it is damaged, of older ones, until one is intact.

        Call it at the start of a job: the files may be old, and no live rank has the state.

        Raises:
            ConfigurationError: there are checkpoints, but none of them is intact.
        """
        named = self._named()
        for step in reversed(named):
            try:
                _verify(self._state, self._path(step))
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

    def start_together(self, rank: int, world_size: int, store: Store) -> None:
        """Checks that all ranks see the same folder. All ranks call it before they begin to train.

        Rank 0 also removes incomplete checkpoints of a former job, so that their parts cannot get into a new one.

        Args:
            rank: this rank.
            world_size: number of ranks that call it.
            store: a store of this generation that all ranks share.

        Raises:
            ConfigurationError: this rank does not see the folder of rank 0, or rank 0 cannot write to the folder.
        """
        if rank == 0:
            self._remove_drafts()
            name = f"draft_probe_{secrets.token_hex(8)}"
            try:
                (self._directory / name).mkdir(parents=True)
            except OSError as error:
                raise ConfigurationError(
                    f"checkpoint_dir {self._directory}: rank 0 cannot write there: {error}; give another checkpoint_dir"
                ) from error
            store.set("probe", name)
        probe = self._directory / store.get("probe").decode()
        is_shared = probe.exists()
        if store.add("probed", 1) == world_size and is_shared:
            probe.rmdir()
        if not is_shared:
            raise ConfigurationError(
                f"checkpoint_dir {self._directory}: rank {rank} does not find there what rank 0 has written, and each "
                "rank writes a part of the checkpoint: give a folder on a file system that all nodes share"
            )

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:010d}"

    def _found(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints that are not known to be damaged, ascending."""
        hopeful = [step for step in self._named() if step not in self._damaged]
        return tuple(step for step in hopeful if os.path.isfile(self._path(step) / CHECKSUMS))

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

    def is_busy(self) -> bool:
        """Whether this rank is writing a checkpoint."""
        self._finish(wait=False)
        return self._writing is not None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of ``step`` is to be written; never one of step 0, before any training."""
        return step > 0 and step % self._every == 0

    def after_step(self, step: int, generation: int, share: Share = ALONE) -> None:
        """Begins to write this rank's part of a checkpoint, if one is due at ``step`` and none is being written.

        It returns after the copy of the state; a thread writes the files. If a checkpoint cannot be written, keepstep
        prints a message, the training continues, and the next checkpoint is tried.

        Args:
            step: the completed step.
            generation: the current generation.
            share: the part that this rank writes. If several ranks write, they must have agreed that none is busy.
        """
        self._is_ending = False
        if self.is_due(step) and not self.is_busy():
            self._begin(step, generation, share)
        self._finish(wait=False)

    def write_now(self, step: int, generation: int, share: Share = ALONE) -> bool:
        """Writes this rank's part of a last checkpoint at ``step``, and waits until the part is on disk.

        Returns:
            whether the checkpoint is complete now. If several ranks write, those that finish early may return False.
        """
        self._is_ending = True
        self._finish(wait=True)
        if self._written != (step, generation):
            self._begin(step, generation, share)
            self._finish(wait=True)
        return step in self._found()

    def rescue(self, step: int, share: Share) -> str:
        """Writes this rank's part of a checkpoint of ``step`` when the job cannot continue. Returns the folder.

        Each live rank calls it. The checkpoint is complete if live ranks hold every shard, all of them at this step.

        Raises:
            OSError: the part cannot be written.
            StateMismatch: the parts of the ranks do not form one state.
        """
        draft = self._directory / f"draft_{step:010d}_rescue"
        if step not in self._found() and _write(*describe(self._state, share), draft, share):
            self._give_name(draft, step)
        return str(self._directory)

    def _begin(self, step: int, generation: int, share: Share) -> None:
        if step in self._found():
            return
        # The name includes the generation, so that a part of a fenced rank is never mistaken for one of the survivors.
        draft = self._directory / f"draft_{step:010d}_generation_{generation}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if share.is_all:
                self._remove_drafts()
            elif share.rank == 0 and not self._is_ending:  # not ending: all ranks have agreed that none is writing
                self._remove_drafts(kept=draft.name)  # other ranks may already write into this one
            content, tensors = describe(self._state, share)
            # In host memory: a GPU that trains has no room for its state a second time.
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        except (OSError, RuntimeError) as error:  # torch's RuntimeError: no memory for the copy
            self._could_not_write(step, error)
            return
        self._written = (step, generation)
        self._writing = (self._thread.submit(self._write_and_name, content, copies, draft, step, share), step)

    def _remove_drafts(self, kept: str | None = None) -> None:
        """Removes incomplete checkpoints, left by ranks that were lost or could not write."""
        for draft in self._directory.glob("draft_*"):
            if draft.name != kept:
                shutil.rmtree(draft, ignore_errors=True)

    def _write_and_name(
        self, content: Content, copies: dict[str, torch.Tensor], draft: Path, step: int, share: Share
    ) -> None:
        """Writes this rank's part, and renames the folder once all parts are on disk. Runs in the writer's thread."""
        try:
            is_complete = _write(content, copies, draft, share)
        except (OSError, RuntimeError):
            if share.is_all:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        if is_complete:
            self._give_name(draft, step)
            for old in self._found()[:-_KEPT]:
                self._remove(old)

    def _finish(self, wait: bool) -> None:
        if self._writing is None:
            return
        future, step = self._writing
        if not wait and not future.done():
            return
        self._writing = None
        try:
            future.result()
        except (OSError, RuntimeError, StateMismatch) as error:
            self._could_not_write(step, error)
            return
        if step in self._found():  # else other ranks still write their parts
            self._news = step
        if self._failing:
            self._failing = False
            _say(f"checkpoints are written again: {self._path(step)}")

    def take_written(self) -> int | None:
        """Returns the step of a checkpoint that has been completed since the last call; None if there is none."""
        self._finish(wait=False)
        written, self._news = self._news, None
        return written

    def _give_name(self, draft: Path, step: int) -> None:
        if step in self._found():
            shutil.rmtree(draft)
            return
        if self._path(step).exists():
            self._remove(step)  # a damaged one
        draft.rename(self._path(step))
        self._damaged.discard(step)

    def _remove(self, step: int) -> None:
        """Renames the folder before it deletes it, so that no rank finds a partially deleted checkpoint."""
        nameless = self._directory / f"draft_{step:010d}_removed"
        self._path(step).rename(nameless)
        shutil.rmtree(nameless)

    def _could_not_write(self, step: int, error: Exception) -> None:
        what = f"the checkpoint {self._path(step)} could not be written: {error}"
        if not self._is_ending:
            self._complain(
                f"{what}. Training continues; it tries again every {self._every} steps, without a further message"
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
        """Loads this rank's blocks and host values of the checkpoint at ``step`` into the protected objects.

        Raises:
            StateMismatch: the checkpoint does not match the protected objects, which have not changed.
            RemoteProtocolError: the checkpoint is damaged or cannot be read. From now on `steps` leaves it out, so that
                the next attempt uses an older one.
        """
        path = self._path(step)
        try:
            reader = StateReader(self._state, SavedCheckpoint(path), str(path))
            reader.verify()
            reader.load()
        except StateMismatch as error:
            advice = "start with what wrote the checkpoint, or give another checkpoint_dir"
            raise StateMismatch(f"{error}; {advice}") from error
        except (OSError, RuntimeError, RemoteProtocolError) as error:
            self._damaged.add(step)
            raise RemoteProtocolError(f"the checkpoint {path} cannot be loaded: {error}") from error


def rescue_parent(run_dir: str, root: str | None) -> Path:
    """Returns the folder in which a rescue makes its own: the first of these that this process can write to.

    They are the working directory, the run folder on this node, and the folder for temporary files.

    Args:
        run_dir: the run folder.
        root: where a drill's checkpoints go, instead of the working directory; None outside of drills.

    Raises:
        OSError: it can write to none.
    """

    def here() -> str:
        return os.getcwd() if root is None else root

    for find in (here, lambda: run_dir, tempfile.gettempdir):
        with contextlib.suppress(OSError):  # the working directory may be deleted
            if os.access(found := find(), os.W_OK | os.X_OK):
                return Path(found)
    raise OSError(f"neither the working directory nor {run_dir} nor the folder for temporary files is writable")


def rescue(state: ProtectedState, step: int, share: Share, parent: Path, *, in_doubt: bool = False) -> str:
    """Saves this rank's state to a folder of its own, for a job without a checkpoint folder.

    If ranks hold parts, all ranks of a machine save to the same folder. It is a checkpoint once it has all parts.

    Args:
        state: the protected state of this rank.
        step: the step of the state.
        share: the part that this rank writes.
        parent: the folder in which to make it.
        in_doubt: the script may have decided something by a value that a failure has cut off. The name says so.

    Returns:
        the path of the folder.

    Raises:
        OSError: the state cannot be written.
        StateMismatch: the parts of the ranks do not form one state.
    """
    doubt = "-in-doubt" if in_doubt else ""
    if share.is_all:
        name = f"{RESCUE_PREFIX}step{step}-rank{share.rank}-"
        path = tempfile.mkdtemp(prefix=name, suffix=doubt, dir=parent)
    else:
        spawner = os.getppid()  # identifies the job: the parent of all its ranks on this machine only
        name = f"{RESCUE_PREFIX}step{step}-{spawner}-{start_of(spawner) or 0}{doubt}"
        path = str(parent / name)
    _write(*describe(state, share), Path(path), share)
    return path


def _write(content: Content, tensors: dict[str, torch.Tensor], folder: Path, share: Share) -> bool:
    """Writes this rank's part. Returns whether this rank completed the checkpoint."""
    write_part(content, tensors, folder, share)
    return complete(folder, share.shards or content.hosts[0].shards)


def _verify(state: ProtectedState, path: Path) -> None:
    """Verifies the checksums of the files that this rank needs; of all files if the checkpoint does not match."""
    saved = SavedCheckpoint(path)
    try:
        StateReader(state, saved, str(path)).verify()
    except StateMismatch:
        saved.verify()  # `load` raises it


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


def _say(text: str) -> None:
    # Not a warning: under -W error it would end the training. In one piece: other ranks say the same at the same time.
    sys.stderr.write(f"keepstep: {text}\n")
