"""The TCP connections of one communicator, which another thread can break.

`abort` and `shutdown` of a gloo group do not release a waiting collective: with a stopped peer all ranks would wait for
the timeout. `shutdown(2)` on the group's connections releases all of them within milliseconds.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.worker.backends.communicator import LOOPBACK

_building = threading.Lock()


class Connections:
    """The connections that were opened while `recording` ran. `cut` may be called from any thread at any time."""

    def __init__(self, host: str = LOOPBACK) -> None:
        """Args:
        host: the address of this machine that gloo uses.
        """
        self._host = host
        self._sockets: list[socket.socket] = []
        self._before: set[str] | None = None
        self._lock = threading.Lock()
        self._is_cut = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records every connection that the block opens. Only one such block runs at a time in a process."""
        with _building:
            with self._lock:
                self._before = set(_socket_inodes())
            try:
                yield
            finally:
                with self._lock:
                    self._collect()
                    self._before = None
                    if self._is_cut:
                        self._shut_down()

    def cut(self) -> None:
        """Shuts down all connections, even of a group that is just being built. Listening sockets stay open."""
        with self._lock:
            self._is_cut = True
            if self._before is not None:
                self._collect()
            self._shut_down()

    def close(self) -> None:
        """Closes the descriptors. Call it when the group itself is gone."""
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()

    def _collect(self) -> None:
        assert self._before is not None
        known = {os.fstat(connection.fileno()).st_ino for connection in self._sockets}
        for inode, descriptor in _socket_inodes().items():
            if inode in self._before or int(inode) in known:
                continue
            if (connection := _own_copy(descriptor, self._host)) is not None:
                self._sockets.append(connection)

    def _shut_down(self) -> None:
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer has closed it already


def _socket_inodes() -> dict[str, int]:
    """Inode -> descriptor of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found[target[8:-1]] = int(name)
    return found


def _own_copy(descriptor: int, host: str) -> socket.socket | None:
    """Returns a duplicate of a connection of gloo's, or None for any other descriptor.

    The duplicate stays valid when the number is reused.
    """
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    if not _is_of_gloo(connection, host):
        connection.close()
        return None
    return connection


def _is_of_gloo(connection: socket.socket, host: str) -> bool:
    """Whether a connection can be gloo's: it begins at gloo's address and, on a single node, also ends there."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        own, peer = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:
        return False  # not connected: a listening socket, or a connection that has ended
    return own == host and (peer == host or host != LOOPBACK)
