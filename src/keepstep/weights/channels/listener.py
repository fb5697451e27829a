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
"""Timeout for the first message of a connecting process."""
POLL_INTERVAL_S = 0.25
"""Interval between two checks whether a listener that does not answer was replaced: its process may be suspended."""
MAX_PATH_BYTES = 96
"""Limit for a socket's path. Linux's struct sockaddr_un allows 107 bytes; a new listener's temporary name is longer."""
NO_BRIDGE = "if it is on another node, each node needs 'keepstep run --weights' or 'keepstep weights serve'"
RETRY_S = 0.02
"""Interval between two attempts to connect to a listener that does not exist yet."""


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
    """The socket path of the process that represents the devices of other nodes."""
    return folder / "far.sock"


def make_private(folder: Path) -> None:
    """Creates the folder with access for this user only, if it does not exist.

    Raises:
        ConfigurationError: the folder belongs to another user, or other users may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigurationError(f"{folder} must belong to this user, and no other user may write in it (chmod 700)")


class Listener:
    """Accepts connections in threads of its own until `close`."""

    def __init__(self, path: Path, answer: Callable[[Connection, AnyTransferMessage], None]) -> None:
        """Args:
        path: path of the socket. An existing socket is replaced: its process is gone, or is being replaced.
        answer: called in the listener's threads with each new connection, which it owns, and its first message.
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
        """Stops accepting connections. Accepted connections stay open."""
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
    """Connects to a device. Waits for the device's listener if it does not exist yet.

    Args:
        path: socket path of the listener.
        introduction: the first message.
        who: name of the device, for messages.
        until_s: deadline on the monotonic clock.
        stop: cancels the wait.

    Raises:
        Cancelled: ``stop`` was set.
        ConnectionStalled: there was no listener, or no answer, in time.
        StaleGeneration: the device refused this process because its generation is over.
        RemoteProtocolError: the device refused this process for another reason.
    """
    return _dial_first(lambda: [_Way(path, introduction)], who, path, until_s, stop)


def dial_rank(
    folder: Path,
    rank: int,
    introduction: DeviceCalled | UpdateOffered | CatchUpCalled,
    until_s: float,
    stop: CancelToken | None = None,
) -> tuple[Connection, Welcomed]:
    """As `dial`, to the device of a rank on this node, or on another node that is linked with this one."""
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
    """A path to dial, and the first message to send. The attempt ends if a closer listener appears at ``unless``."""

    path: Path
    introduction: AnyTransferMessage
    unless: Path | None = None


def _dial_first(
    ways: Callable[[], Sequence[_Way]], who: str, where: Path, until_s: float, stop: CancelToken | None
) -> tuple[Connection, Welcomed]:
    """Tries the ways in turn until a listener answers."""
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
