"""Has servers load each version that is published in a folder. ``keepstep weights load`` runs it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.engines.names import plain_names
from keepstep.engines.server import NewVersion
from keepstep.engines.updates import ServerUpdates
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.programs import check_installed
from keepstep.weights.inbox import VersionInbox
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S

LOOK_S = 0.2
"""How often to look for ``stop`` while no version comes."""


def load_versions(
    folder: str | Path,
    updates: ServerUpdates,
    stop: threading.Event,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Has servers on this machine load each version, until ``stop`` is set.

    It waits for publishers, and for servers: a training job may be restarted, and so may a server. If a server needs
    longer than the next version takes to come, it gets the newest one next. Training waits for none of them.

    Args:
        folder: the publishers' folder.
        updates: what drives the servers. Its folder for files holds the newest version, and those that a server is
            loading.
        stop: ends it.
        deadline_s: see `keepstep.Subscriber`.
        note: gets a line for each version that cannot be given to a server.

    Raises:
        ConfigurationError: safetensors is missing, and a server reads files.
    """
    files = updates.files
    if files is not None:
        check_installed("SGLang", ("safetensors",), "sglang")
    name = "keepstep weights load"
    with VersionInbox(folder, name=name, deadline_s=deadline_s, keeps_values=files is not None) as inbox:
        while not stop.is_set():
            used = [each.path for each in updates.in_use()]
            for path in [] if files is None else files.iterdir():
                if path not in used:
                    shutil.rmtree(path)
            try:
                number, tensors = inbox.take(LOOK_S)
            except KeepstepError:  # none has come
                continue
            form = tuple(
                (name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
            )
            try:
                new = None if files is None else _write(files / str(number), tensors)
            except ConfigurationError as error:
                note(f"version {number}: {error}")
                continue
            updates.offer(NewVersion(number, str(folder), form, new))


def _write(path: Path, tensors: dict[str, Any]) -> Path:
    """Writes a version as a checkpoint of one file, in a folder of its own."""
    from safetensors.torch import save_file

    while path.exists():  # a job has gone back to this version, and a server may be reading the first one
        path = path.with_name(path.name + "-again")
    names = plain_names(tensors)
    path.mkdir()
    save_file({names[name]: each for name, each in tensors.items()}, path / "new", metadata={"format": "pt"})
    (path / "new").rename(path / "model.safetensors")
    return path
