"""The door of a device: a Unix socket in a folder of the user's own, where others knock.

Whoever knocks must run as the same user, and say at once what the line is for.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keepstep.errors import ConfigurationError, PeerLost, RemoteProtocolError, StaleGeneration
from keepstep.protocol.transfer.messages import AnyTransferMessage, Refused, Welcomed
from keepstep.weights.lines.line import Flag, Line, LineStalled, same_user, wait, what_of

INTRODUCTION_S = 2.0
"""For whoever knocks to say who it is: it has nothing to wait for before that."""
LOOK_S = 0.25
"""Between two looks whether a door that does not answer has been replaced: its process may be stopped."""
MAX_PATH_BYTES = 96
"""Of a socket's name. Linux' struct sockaddr_un has 107, of which a new door needs some for its first name."""
RETRY_S = 0.02
"""Between two knocks at a door that is not there yet: no event tells of a socket that begins to listen."""


def door_path(folder: Path, rank: int) -> Path:
    """Where the door of a rank is.

    Raises:
        ConfigurationError: the folder's name is too long for a socket.
    """
    path = folder / f"{rank}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"{path} is too long for a socket's name ({MAX_PATH_BYTES} bytes): use a shorter folder"
        )
    return path


def make_private(folder: Path) -> None:
    """Makes the folder, for this user alone.

    Raises:
        ConfigurationError: it belongs to somebody else, or others may write in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigurationError(f"{folder} must belong to this user, and nobody else may write in it (chmod 700)")


class Door:
    """Answers those who knock, in a thread of its own, until `close`."""

    def __init__(self, path: Path, answer: Callable[[Line, AnyTransferMessage], None]) -> None:
        """Args:
        path: of the socket; one that is there already is replaced, its process is gone or replaced too.
        answer: given each new line with its first message; runs in the door's threads, owns the line.
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
        threading.Thread(target=self._listen, name="keepstep-door", daemon=True).start()

    def close(self) -> None:
        """Closes it; lines that came through it stay."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _listen(self) -> None:
        while True:
            try:
                connection, _address = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._introduce, args=[connection], name="keepstep-knock", daemon=True).start()

    def _introduce(self, connection: socket.socket) -> None:
        line = Line(connection, "whoever knocks")
        try:
            if not same_user(connection):
                line.send(Refused("the caller runs as another user", stale=False), time.monotonic() + INTRODUCTION_S)
                raise RemoteProtocolError("the caller runs as another user")
            message = line.receive(time.monotonic() + INTRODUCTION_S)
        except (PeerLost, RemoteProtocolError):
            line.close()
            return
        self._answer(line, message)


def knock(
    path: Path, introduction: AnyTransferMessage, who: str, until_s: float, stop: Flag | None = None
) -> tuple[Line, Welcomed]:
    """Opens a line to a device; waits for its door if it is not there yet.

    Raises:
        Interrupted: by ``stop``.
        LineStalled: no door, or no answer, in time.
        StaleGeneration: this process's generation is over.
        RemoteProtocolError: refused for another reason.
    """
    while True:
        try:
            return _knock(path, introduction, who, until_s, stop)
        except (FileNotFoundError, ConnectionError, BlockingIOError, PeerLost) as error:
            if time.monotonic() + RETRY_S >= until_s:
                raise LineStalled(who, f"does not answer at {path} ({what_of(error)})") from None
            wait([], time.monotonic() + RETRY_S, stop)


def _knock(
    path: Path, introduction: AnyTransferMessage, who: str, until_s: float, stop: Flag | None
) -> tuple[Line, Welcomed]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(connection, who)
    try:
        door = path.stat().st_ino
        try:
            connection.connect(os.fspath(path))
        except PermissionError:
            raise RemoteProtocolError(f"{path} may not be opened by this user") from None
        if not same_user(connection):
            raise RemoteProtocolError(f"{path} belongs to another user's process")
        line.send(introduction, until_s)
        while not wait([line], min(until_s, time.monotonic() + LOOK_S), stop):
            if time.monotonic() >= until_s or path.stat().st_ino != door:
                raise LineStalled(who, "does not answer")  # or another one has taken its place
        match line.receive(until_s):
            case Welcomed() as welcomed:
                return line, welcomed
            case Refused(reason, stale):
                raise (StaleGeneration if stale else RemoteProtocolError)(f"{who} refuses this process: {reason}")
            case other:
                raise RemoteProtocolError(f"{who} answers a knock with {type(other).__name__}")
    except BaseException:  # the line has no owner yet
        line.close()
        raise
