"""A lock that detects its holder's death at once, before the kernel has freed the process's memory.

When a process is killed, the kernel first frees its memory, and only then closes its sockets and notifies its parent.
That takes 70 ms for a 10 M-parameter job (2 cores, November 2026), and seconds for a large one. The kernel releases a
robust mutex before that, as its first action for a dying thread (`man pthread_mutexattr_setrobust`). So the training
thread holds one in shared memory, and a thread of its agent waits for it. While the worker lives, this costs nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable

from keepstep.errors import InternalError
from keepstep.systemcalls import memory_file

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_ATTRIBUTE_BYTES = 64
"""More than any pthread_mutexattr_t of glibc. The mutex itself has a whole page."""
_libc = ctypes.CDLL(None)


class Lifeline:
    """One process's mapping of the lock. ``descriptor`` is that of `create`; the caller may close it afterwards."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._mutex = ctypes.byref(ctypes.c_char.from_buffer(self._map))

    def hold(self) -> None:
        """Takes the lock for the calling thread, whose death `watch` then detects.

        Raises:
            InternalError: the mutex cannot be locked.
        """
        self._check(_libc.pthread_mutex_lock(self._mutex), "lock")

    def release(self) -> None:
        """Releases the lock, so that the regular end of the thread does not count as its death.

        Raises:
            InternalError: the mutex cannot be unlocked.
        """
        self._check(_libc.pthread_mutex_unlock(self._mutex), "unlock")

    def watch(self, on_death: Callable[[], None]) -> None:
        """Starts a thread that waits until the holder is dead or has released the lock.

        Args:
            on_death: called in that thread if the holder has died.
        """
        threading.Thread(target=self._wait, args=(on_death,), name="keepstep-lifeline", daemon=True).start()

    def _wait(self, on_death: Callable[[], None]) -> None:
        code = _libc.pthread_mutex_lock(self._mutex)
        if code == errno.EOWNERDEAD:
            on_death()
        if code in (0, errno.EOWNERDEAD):
            _libc.pthread_mutex_unlock(self._mutex)

    @staticmethod
    def _check(code: int, what: str) -> None:
        if code:
            raise InternalError(f"the lifeline could not {what}: {os.strerror(code)}")


def create(name: str) -> int:
    """Creates a free lock and returns its file descriptor, which the caller owns.

    Args:
        name: a name for people, shown in ``/proc/PID/fd`` only.

    Raises:
        InternalError: the mutex cannot be initialised.
    """
    descriptor = memory_file(name, mmap.PAGESIZE)
    with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)
        mutex = ctypes.c_char.from_buffer(memory)
        code = _libc.pthread_mutex_init(ctypes.byref(mutex), attributes)
        del mutex  # the mapping cannot be closed while a reference to it exists
        _libc.pthread_mutexattr_destroy(attributes)
    if code:
        raise InternalError(f"the lifeline could not be made: {os.strerror(code)}")
    return descriptor
