"""Has servers load each version that is published in a folder. ``keepstep weights load`` runs it."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepstep.engines.names import plain_names
from keepstep.engines.server import NewVersion, Server
from keepstep.engines.sglang import SGLangServer
from keepstep.engines.updates import ServerUpdates
from keepstep.errors import ConfigurationError, KeepstepError
from keepstep.programs import check_installed
from keepstep.weights.inbox import VersionInbox
from keepstep.weights.subscriber import DEFAULT_DEADLINE_S

LOOK_S = 0.2
"""How often to look for ``stop`` while no version comes."""


def load_versions(
    folder: str | Path,
    servers: Sequence[Server],
    stop: threading.Event,
    *,
    memory: str | Path = "/dev/shm",
    deadline_s: float = DEFAULT_DEADLINE_S,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Has servers on this machine load each version, until ``stop`` is set.

    It waits for publishers, and for servers: a training job may be restarted, and so may a server. If a server needs
    longer than the next version takes to come, it gets the newest one next. Training waits for none of them.

    Args:
        folder: the publishers' folder.
        servers: the servers. No other process may drive them.
        stop: ends it, once a change that is under way is complete.
        memory: parent folder for the versions as files, if a server loads files. It holds the newest version, and
            those that a server is loading.
        deadline_s: see `keepstep.Subscriber`.
        note: gets a line for each change of a server's state.

    Raises:
        ConfigurationError: safetensors is missing; or another process drives one of the servers.
    """
    writes = any(isinstance(server, SGLangServer) for server in servers)
    if writes:
        check_installed("SGLang", ("safetensors",), "sglang")
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-versions-", dir=memory if writes else None) as parent,
        ServerUpdates(servers, files=Path(parent), note=note) as updates,
        VersionInbox(folder, name="keepstep weights load", deadline_s=deadline_s, keeps_values=writes) as inbox,
    ):
        while not stop.is_set():
            used = [each.path for each in updates.in_use()]
            for path in Path(parent).iterdir():
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
                new = _write(Path(parent) / str(number), tensors) if writes else None
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
