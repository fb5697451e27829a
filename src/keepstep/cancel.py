"""A token with which one thread cancels the waits of others."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress


class Cancelled(Exception):
    """Another thread has set the cancel token of the wait."""


class CancelToken:
    """An event that a thread waits for in addition to its own condition. Any thread may set it to end the wait."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._event)
        self._lock = threading.Lock()
        """Guards the file descriptor against use after `close`, when its number may belong to another file."""

    def fileno(self) -> int:
        """Returns the file descriptor, which is readable while the token is set."""
        return self._event

    def set(self) -> None:
        """Ends all current waits, and all later ones until `clear`."""
        with self._lock:
            if self._close.alive:
                os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Resets the token, so that threads can wait again."""
        with self._lock, suppress(BlockingIOError):
            if self._close.alive:
                os.eventfd_read(self._event)

    def close(self) -> None:
        """Closes the file descriptor. No thread may wait any more; `set` does nothing. Repeated calls do no harm."""
        with self._lock:
            self._close()
