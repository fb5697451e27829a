"""The listener of a device: a Unix socket in a folder of the user, to which others connect.

A connecting process must run as the same user, and its first message names the purpose of the connection.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from keepstep.cancel import CancelToken
from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer.messages import (
    AnyTransferMessage,
    CatchUpCalled,
    DeviceCalled,
    FarCalled,
    ProxyCalled,
    Refused,
    SubscriberCalled,
    UpdateOffered,
    Welcomed,
)
from keepstep.weights.channels.connection import Connection, ConnectionStalled, same_user, wait, what_of

INTRODUCTION_S = 2.0
"""For a process that dials to say who it is: it has nothing to wait for before that."""
POLL_INTERVAL_S = 0.25
"""Between two looks whether a listener that does not answer has been replaced: its process may be stopped."""
MAX_PATH_BYTES = 96
"""Of a socket's name. Linux' struct sockaddr_un has 107, of which a new listener needs some for its first name."""
NO_BRIDGE = "if it is on another node, each node needs 'keepstep run --weights' or 'keepstep weights serve'"
RETRY_S = 0.02
"""Between two attempts to dial a listener that is not there yet: no event tells of a socket that begins to listen."""


def listener_path(folder: Path, rank: int) -> Path:
    """Where the listener of a rank is.

    Raises:
        ConfigurationError: the folder's name is too long for a socket.
    """
    path = folder / f"{rank}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"{path} is too long for a socket's name ({MAX_PATH_BYTES} bytes): use a shorter folder"
        )
    return path


def far_path(folder: Path) -> Path:
    """Where the process listens that stands in for the devices of other nodes. Hardly longer than `listener_path`."""
    return folder / "far.sock"


def make_private(folder: Path) -> None:
    """Makes the folder, for this user alone.

    Raises:
        ConfigurationError: it belongs to another user, or others may write in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigurationError(f"{folder} must belong to this user, and no other user may write in it (chmod 700)")


class Listener:
    """Answers those who dial, in a thread of its own, until `close`."""

    def __init__(self, path: Path, answer: Callable[[Connection, AnyTransferMessage], None]) -> None:
        """Args:
        path: of the socket; one that is there already is replaced, its process is gone or replaced too.
        answer: given each new connection with its first message; runs in the listener's threads, owns the connection.
        """
        self._path, self._answer = path, answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fresh = path.with_name(f".{path.stem}.{os.getpid()}")
        with suppress(FileNotFoundError):
            fresh.unlink()
        self._socket.bind(os.fspath(fresh))
        fresh.chmod(0o600)
        self._socket.listen(128)
        self._inode = fresh.stat().st_ino
        fresh.rename(path)
        threading.Thread(target=self._listen, name="keepstep-listener", daemon=True).start()

    def close(self) -> None:
        """Closes it; connections that came through it stay."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _listen(self) -> None:
        while True:
            try:
                sock, _address = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._introduce, args=[sock], name="keepstep-dial", daemon=True).start()

    def _introduce(self, sock: socket.socket) -> None:
        connection = Connection(sock, "a process that dials")
        try:
            if not same_user(sock):
                connection.send(
                    Refused("the caller runs as another user", stale=False), time.monotonic() + INTRODUCTION_S
                )
                raise RemoteProtocolError("the caller runs as another user")
            message = connection.receive(time.monotonic() + INTRODUCTION_S)
        except (PeerLost, RemoteProtocolError):
            connection.close()
            return
        self._answer(connection, message)


def dial(
    path: Path, introduction: AnyTransferMessage, who: str, until_s: float, stop: CancelToken | None = None
) -> tuple[Connection, Welcomed]:
    """Opens a connection to a device; waits for its listener if it is not there yet.

    Raises:
        Cancelled: by ``stop``.
        ConnectionStalled: no listener, or no answer, in time.
        StaleGeneration: this process's generation is over.
        RemoteProtocolError: refused for another reason.
    """
    return _dial_first(lambda: [_Way(path, introduction)], who, path, until_s, stop)


def dial_rank(
    folder: Path,
    rank: int,
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled,
    until_s: float,
    stop: CancelToken | None = None,
) -> tuple[Connection, Welcomed]:
    """As `dial`, to a device that is on this node or on another one whose bridge has a link to that of this node."""
    here = listener_path(folder, rank)
    ways = [_Way(here, introduction), _Way(far_path(folder), FarCalled(rank, introduction), unless=here)]
    return _dial_first(lambda: ways, f"rank {rank}", here, until_s, stop)


def dial_any(
    folder: Path, introduction: SubscriberCalled | ProxyCalled, until_s: float, stop: CancelToken | None = None
) -> tuple[Connection, Welcomed]:
    """As `dial`, to the device of the lowest rank on this node that answers."""

    def ways() -> list[_Way]:
        ranks = sorted(int(path.stem) for path in folder.glob("*.sock") if path.stem.isdecimal())
        return [_Way(listener_path(folder, rank), introduction) for rank in ranks]

    connection, welcomed = _dial_first(ways, "a publisher", folder, until_s, stop)
    connection.who = f"rank {welcomed.rank}"
    return connection, welcomed


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """Where to dial, and what to say there; ``unless`` another listener begins, which is nearer."""

    path: Path
    introduction: AnyTransferMessage
    unless: Path | None = None


def _dial_first(
    ways: Callable[[], Sequence[_Way]], who: str, where: Path, until_s: float, stop: CancelToken | None
) -> tuple[Connection, Welcomed]:
    """Tries one way after the other, until one of them leads to a listener that answers."""
    while True:
        problem, is_absent = "no process listens", False
        for way in ways():
            try:
                return _dial(way, who, until_s, stop)
            except FileNotFoundError as error:
                if way.unless is None:
                    problem, is_absent = str(error), True
                elif is_absent:  # not only silent
                    problem = f"{problem}; {NO_BRIDGE}"
            except (ConnectionError, BlockingIOError, PeerLost) as error:
                problem = what_of(error)
        if time.monotonic() + RETRY_S >= until_s:
            raise ConnectionStalled(who, f"does not answer at {where} ({problem})")
        wait([], time.monotonic() + RETRY_S, stop)


def _dial(way: _Way, who: str, until_s: float, stop: CancelToken | None) -> tuple[Connection, Welcomed]:
    path = way.path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(sock, who)
    try:
        nearer = _inode_of(way.unless)
        listener = path.stat().st_ino
        try:
            sock.connect(os.fspath(path))
        except PermissionError:
            raise RemoteProtocolError(f"{path} may not be opened by this user") from None
        if not same_user(sock):
            raise RemoteProtocolError(f"{path} belongs to another user's process")
        connection.send(way.introduction, until_s)
        while not wait([connection], min(until_s, time.monotonic() + POLL_INTERVAL_S), stop):
            is_replaced = path.stat().st_ino != listener or _inode_of(way.unless) != nearer
            if time.monotonic() >= until_s or is_replaced:
                raise ConnectionStalled(who, "does not answer")
        match connection.receive(until_s):
            case Welcomed() as welcomed:
                return connection, welcomed
            case Refused(reason, stale):
                raise (StaleGeneration if stale else RemoteProtocolError)(f"{who} refuses this process: {reason}")
            case other:
                raise RemoteProtocolError(f"{who} answers a dial with {type(other).__name__}")
    except BaseException:  # the connection has no owner yet
        connection.close()
        raise


def _inode_of(path: Path | None) -> int | None:
    with suppress(FileNotFoundError):
        return None if path is None else path.stat().st_ino
    return None
