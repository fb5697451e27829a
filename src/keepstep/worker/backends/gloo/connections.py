"""The TCP connections of one communicator, which another thread can break.

`abort` and `shutdown` of a gloo group do not release a waiting collective: with a stopped peer all ranks would wait for
the timeout. `shutdown(2)` on the group's connections releases all of them within milliseconds.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from keepstep.worker.backends.communicator import LOOPBACK

_building = threading.Lock()

Address = tuple[str, int]
"""Host and port of one end of a connection."""


class Connections:
    """The connections that were opened while `recording` ran. `cut` may be called from any thread at any time."""

    def __init__(self, host: str = LOOPBACK) -> None:
        """Args:
        host: the address of this machine that gloo uses.
        """
        self._host = host
        self._sockets: list[socket.socket] = []
        self._listeners: frozenset[Address] | None = None
        """Where gloo listens on each member, once that is known."""
        self._before: set[str] | None = None
        self._lock = threading.Lock()
        self._is_cut = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records every connection that the block opens. Only one such block runs at a time in a process."""
        with _building:
            with self._lock:
                self._before = set(socket_inodes())
            try:
                yield
            finally:
                with self._lock:
                    self._collect()
                    self._before = None
                    if self._is_cut:
                        self._shut_down()

    def restrict(self, listeners: Iterable[Address]) -> None:
        """Leaves alone all connections of which neither end is one of these: threads of the script may open some.

        Args:
            listeners: where gloo listens on all members.
        """
        self._listeners = frozenset(listeners)

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
        for inode, descriptor in socket_inodes().items():
            if inode in self._before or int(inode) in known:
                continue
            if (connection := self._own_copy(descriptor)) is not None:
                self._sockets.append(connection)

    def _own_copy(self, descriptor: int) -> socket.socket | None:
        """Returns a duplicate of a connection of gloo's; None for any other descriptor."""
        connection = _copy(descriptor)
        if connection is None or self._is_of_gloo(connection):
            return connection
        connection.close()
        return None

    def _is_of_gloo(self, connection: socket.socket) -> bool:
        """Whether a connection is gloo's: one end is where a member listens.

        Before that is known it can be gloo's if it begins at gloo's address and, on a single node, also ends there.
        """
        if not _is_tcp(connection):
            return False
        try:
            own, peer = connection.getsockname()[:2], connection.getpeername()[:2]
        except OSError:
            return False  # not connected: a listening socket, or a connection that has ended
        if self._listeners is not None:
            return own in self._listeners or peer in self._listeners
        return own[0] == self._host and (peer[0] == self._host or self._host != LOOPBACK)

    def _shut_down(self) -> None:
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer has closed it already


def listening_since(before: Iterable[str]) -> list[Address]:
    """The addresses at which this process listens, and did not when it had only the sockets with these inodes."""
    found = []
    for inode, descriptor in socket_inodes().items():
        if inode not in before and (opened := _copy(descriptor)) is not None:
            with opened:
                if _is_tcp(opened) and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(opened.getsockname()[:2])
    return found


def socket_inodes() -> dict[str, int]:
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


def _copy(descriptor: int) -> socket.socket | None:
    """A duplicate of a socket, which stays valid when the number is reused; None for any other descriptor."""
    try:
        return socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None


def _is_tcp(opened: socket.socket) -> bool:
    return opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
