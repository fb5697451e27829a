"""Ending a wait from another thread."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress


class Cancelled(Exception):
    """The wait was ended by its cancel token."""


class CancelToken:
    """An event that ends waits, beside what they wait for. Any thread may set it."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._event)
        self._lock = threading.Lock()
        """The descriptor's number may be another file's once it is closed."""

    def fileno(self) -> int:
        """Readable when it is set."""
        return self._event

    def set(self) -> None:
        """Ends all waits for it, the present and the coming ones."""
        with self._lock:
            if self._close.alive:
                os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """It can be waited for again."""
        with self._lock, suppress(BlockingIOError):
            if self._close.alive:
                os.eventfd_read(self._event)

    def close(self) -> None:
        """Gives the descriptor back; no thread may wait any more. Any number of times; setting it does nothing then."""
        with self._lock:
            self._close()
