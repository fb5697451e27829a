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


def private(path: str, flags: int) -> int:
    """Opens a file for `open`; a new one is for this user only."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def replacing(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Yields a draft file next to ``path``. It replaces ``path`` when the block exits; after an error it is removed.

    ``is_private``: it is for this user only.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        with open(draft, "wb", opener=private if is_private else None) as file:
            yield file
        draft.replace(path)
    except BaseException:  # removes the incomplete draft
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Writes a file atomically. ``is_private``: see `replacing`."""
    with replacing(path, is_private=is_private) as file:
        file.write(data)
