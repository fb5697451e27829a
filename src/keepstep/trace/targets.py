"""Output files that a user requested. They are checked before the work starts, and written atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepstep.errors import ConfigurationError


def check_target(flag: str, path: Path) -> Path:
    """Returns ``path`` after checking that a file can be written there.

    Raises:
        ConfigurationError: it cannot; the message names the flag, the path and the reason.
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
    """Yields a draft file next to ``path``. It replaces ``path`` when the block exits; after an error it is removed."""
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except BaseException:  # removes the incomplete draft
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    with replacing(path) as file:
        file.write(data)
