"""Decides which connections without a token the controller's end closes, so that agents always have room.

gRPC counts all connections alike, closes those beyond its limit as they come, and cannot close one that is open. So a
stranger that renews thousands of connections would keep agents out. `StrangerLimit` gives connections that have not
shown a token a limit of their own, far below gRPC's. It finds them among the open files of the process, and shuts them
down; gRPC then sees their end, and closes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
from collections import Counter
from collections.abc import Iterable

LOOK_S = 0.1
"""Interval at which connections are counted. A stranger opens some hundred connections in it."""
_MAPPED = "::ffff:"
"""The prefix of an IPv4 address on an IPv6 socket: gRPC listens on such a socket if the kernel has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Connection:
    descriptor: int
    inode: int
    host: str
    address: str
    """HOST:PORT, or [HOST]:PORT of IPv6."""


class StrangerLimit:
    """The connections to one port of this process, and which of them have shown a token."""

    def __init__(self, port: int, most: int) -> None:
        """Args:
        port: the port on which the process listens.
        most: the number of connections without a token that may be open.
        """
        self._port = port
        self._most = most
        self._admitted_until_s: dict[str, float] = {}
        """Address of a connection -> when its admission ends."""
        self._known: dict[int, _Connection | None] = {}
        """Inode of each open file, in the order in which they were first seen -> the connection; None: another file."""

    def admit(self, address: str, until_s: float = math.inf) -> None:
        """Records that the connection from an address, HOST:PORT or [HOST]:PORT, has shown a valid token."""
        self._admitted_until_s[address] = max(until_s, self._admitted_until_s.get(address, until_s))

    def forget(self, address: str) -> None:
        """Records that the connection from an address has ended, or has no call any more."""
        self._admitted_until_s.pop(address, None)

    def look(self, now_s: float) -> int:
        """Closes connections of strangers beyond the limit, and returns how many.

        Each is the oldest of the host that has most of them, so that a host with a thousand does not displace an agent
        that connects from another one.
        """
        for address in [each for each, until_s in self._admitted_until_s.items() if until_s <= now_s]:
            del self._admitted_until_s[address]
        files = os.listdir("/proc/self/fd")
        if len(files) - len(self._admitted_until_s) <= self._most:
            return 0  # the usual case, without a system call for each file
        strangers = [each for each in self._connections(files) if each.address not in self._admitted_until_s]
        excess = _by_crowd(strangers)[: max(0, len(strangers) - self._most)]
        for stranger in excess:
            _shut_down(stranger)
        return len(excess)

    def _connections(self, files: Iterable[str]) -> list[_Connection]:
        """Returns the open connections, oldest first."""
        known: dict[int, _Connection | None] = {}
        for descriptor in map(int, files):
            with contextlib.suppress(OSError):  # one of gRPC's threads has closed it
                inode = os.fstat(descriptor).st_ino
                before = self._known.get(inode)
                is_known = inode in self._known and (before is None or before.descriptor == descriptor)
                known[inode] = before if is_known else self._connection(descriptor, inode)
        self._known = {inode: known[inode] for inode in self._known if inode in known} | known
        return [connection for connection in self._known.values() if connection is not None]

    def _connection(self, descriptor: int, inode: int) -> _Connection | None:
        """Returns the connection to the port that an open file is; None if it is none."""
        try:
            borrowed = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            return None
        try:
            if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.getsockname()[1] != self._port:
                return None
            host, port = borrowed.getpeername()[:2]
        except OSError:  # it listens, or has ended
            return None
        finally:
            borrowed.detach()  # it is gRPC's
        host = host.removeprefix(_MAPPED)
        return _Connection(descriptor, inode, host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _by_crowd(strangers: list[_Connection]) -> list[_Connection]:
    """Returns strangers in the order in which to close them: each is the oldest of the host that then has most."""
    num_left = Counter(each.host for each in strangers)
    crowds = []
    for each in strangers:
        crowds.append(num_left[each.host])
        num_left[each.host] -= 1
    order = sorted(range(len(strangers)), key=crowds.__getitem__, reverse=True)
    return [strangers[index] for index in order]


def _shut_down(connection: _Connection) -> None:
    """Shuts a connection down, unless one of gRPC's threads has closed it and opened another file in its place."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
        if os.fstat(copy.fileno()).st_ino == connection.inode:
            copy.shutdown(socket.SHUT_RDWR)
