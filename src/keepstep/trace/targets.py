"""Output files that a user requested: checked before the work starts, and written completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepstep.errors import ConfigurationError


def check_target(flag: str, path: Path) -> Path:
    """Returns ``path`` if a file can be written there.

    Raises:
        ConfigurationError: it cannot; the message names the flag, the path and what is in the way.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(f"{flag} {path}: the folder {folder} does not exist")
    if path.is_dir():
        raise ConfigurationError(f"{flag} {path}: is a folder; name a file")
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{flag} {path}: the folder {folder} is not writable")
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A draft next to ``path``, which takes its place when all has been written; after an error nothing is left."""
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except BaseException:  # half a file is of no use, and the error goes on
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with replacing(path) as file:
        file.write(data)
