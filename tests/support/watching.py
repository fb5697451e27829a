"""Waits until something changes in a folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
"""Constants of <sys/inotify.h>."""
POLL_INTERVAL_S = 0.1
_libc = ctypes.CDLL(None, use_errno=True)


def attempts(folder: Path, timeout_s: float) -> Iterator[None]:
    """Yields now, after each change in a folder, and at times without one: a process may end without a change."""
    deadline_s = time.monotonic() + timeout_s
    with contextlib.closing(FolderWatch(folder)) as watch:
        while time.monotonic() < deadline_s:
            yield
            watch.wait(POLL_INTERVAL_S)


def await_journal(path: Path, word: str, count: int) -> None:
    """Waits until a job's journal contains ``word`` ``count`` times."""
    for _ in attempts(path.parent, 60.0):
        if path.exists() and path.read_text().count(f'"{word}"') >= count:
            return
    raise AssertionError(f"{word} did not come")


class FolderWatch:
    """Watches for files that are written, created or moved in a folder (not below it), with inotify."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = _libc.inotify_add_watch(self._descriptor, str(folder).encode(), _MODIFY | _MOVED_TO | _CREATE)
        if watch < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {folder}")

    def wait(self, timeout_s: float) -> bool:
        """Returns whether a file has changed since the last call, or changes within ``timeout_s``."""
        there, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if there:
            os.read(self._descriptor, 1 << 16)
        return bool(there)

    def close(self) -> None:
        """Ends the watch."""
        os.close(self._descriptor)
