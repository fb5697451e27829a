"""A line between two processes of one node: typed messages over a Unix socket, with descriptors beside them.

The socket keeps the bounds of packets (SOCK_SEQPACKET). A message that is too long for a packet travels in a memory
file whose descriptor goes in its place. Nothing here blocks without a deadline.
"""

from __future__ import annotations

import array
import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from keepstep.errors import BufferUnavailable, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import MAX_BODY_BYTES, AnyTransferMessage, decode, encode

INLINE_BYTES = 1 << 15
"""Longer messages travel in a file. Well below the 208 KiB that Linux lets a socket hold."""
MAX_DESCRIPTORS = 2
_INT_BYTES = array.array("i").itemsize
_INLINE, _IN_FILE = b"m", b"f"
_CREDENTIALS = struct.Struct("iII")


class LineLost(PeerLost):
    """Nothing more can be had from the other end. ``what`` it did, without its name."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(f"{who} {what}")
        self.what = what


class LineEnded(LineLost):
    """The other end is closed: its process has ended, or wants no more of it."""


class LineStalled(LineLost):
    """The other end did not read or say anything within the deadline."""


def what_of(error: Exception) -> str:
    """What happened, for a message that names who it was already."""
    return error.what if isinstance(error, LineLost) else str(error)


class Interrupted(Exception):
    """The wait was ended by the flag that stops it."""


class Flag:
    """An event that can be waited for beside lines; any thread may set it."""

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
        """Gives the descriptor back; nobody may wait any more. Any number of times, and setting it does nothing."""
        with self._lock:
            self._close()


class Line:
    """One end. One thread may send while another receives; not more of either."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        """Args:
        connection: connected; the line owns it.
        who: is at the other end, for messages.
        """
        self.who = who
        connection.setblocking(False)
        self._connection = connection
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """For `wait`."""
        return self._connection.fileno()

    def send(self, message: AnyTransferMessage, until_s: float, descriptors: Sequence[int] = ()) -> None:
        """Sends a message; the caller keeps its own copies of the descriptors.

        Raises:
            LineEnded, LineStalled: it did not get out.
            BufferUnavailable: this process may not have so much memory.
        """
        body = encode(message)
        if len(body) <= INLINE_BYTES:
            self._send(_INLINE + body, descriptors, until_s)
            return
        with open(os.memfd_create("keepstep-message", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            try:
                is_whole = file.write(body) == len(body)
            except OSError:  # beyond RLIMIT_FSIZE
                is_whole = False
            if not is_whole:
                raise BufferUnavailable(f"a message of {len(body)} bytes does not fit into a memory file")
            self._send(_IN_FILE, [file.fileno(), *descriptors], until_s)

    def _send(self, packet: bytes, descriptors: Sequence[int], until_s: float) -> None:
        while True:
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                self._connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if not _poll([(self, select.POLLOUT)], until_s):
                    raise LineStalled(self.who, "reads nothing") from None
            except OSError as error:
                raise LineEnded(self.who, f"has closed the line ({error.strerror})") from None

    def receive(self, until_s: float) -> AnyTransferMessage:
        """The next message. Descriptors that came with it wait in `take_descriptor`.

        Raises:
            LineEnded, LineStalled: none came.
            RemoteProtocolError: what came is no message.
        """
        while True:
            message = self.receive_now()
            if message is not None:
                return message
            if not _poll([(self, select.POLLIN)], until_s):
                raise LineStalled(self.who, "says nothing")

    def receive_now(self) -> AnyTransferMessage | None:
        """The next message, if one is there; see `receive`."""
        try:
            packet, rights = self._receive_packet()
        except BlockingIOError:
            return None
        except OSError as error:
            raise LineEnded(self.who, f"has closed the line ({error.strerror})") from None
        descriptors = _descriptors_in(rights)
        try:
            message = self._message(packet, descriptors)
        except BaseException:  # they came with something that is no message
            _close_all(descriptors)
            raise
        self._descriptors += descriptors
        return message

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        rooms = INLINE_BYTES + 1, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        try:
            packet, rights, _flags, _address = self._connection.recvmsg(*rooms)
        except ConnectionResetError:
            # The other end closed and left packets unread. Linux says so once; what it had sent is still there.
            packet, rights, _flags, _address = self._connection.recvmsg(*rooms)
        return packet, rights

    def _message(self, packet: bytes, descriptors: list[int]) -> AnyTransferMessage:
        """What a packet says; takes its own descriptor out of the list."""
        if not packet:
            raise LineEnded(self.who, "has closed the line")
        if packet[:1] == _INLINE:
            return decode(packet[1:])
        if packet != _IN_FILE or not descriptors:
            raise RemoteProtocolError(f"{self.who} sent a packet that is no message")
        return decode(_read_file(descriptors.pop(0), self.who))

    def take_descriptor(self) -> int:
        """The oldest descriptor that has come; the caller owns it.

        Raises:
            RemoteProtocolError: none came.
        """
        if not self._descriptors:
            raise RemoteProtocolError(f"{self.who} sent no descriptor where one belongs")
        return self._descriptors.pop(0)

    @property
    def is_closed(self) -> bool:
        """Whether this end is closed."""
        return self._connection.fileno() < 0

    @property
    def has_ended(self) -> bool:
        """Whether the other end is closed; messages that came before that may still be there."""
        return any(event & (select.POLLHUP | select.POLLERR) for event in _poll([(self, 0)], 0.0).values())

    def hang_up(self) -> None:
        """Ends the line for whoever waits on it, here and there; for threads that do not own it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the line, here and there. Any number of times."""
        _close_all(self._descriptors)
        self._descriptors = []
        self._connection.close()


def _descriptors_in(rights: list[tuple[int, int, bytes]]) -> list[int]:
    """What `socket.recv_fds` would give, which knows no flags."""
    found = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_file(descriptor: int, who: str) -> bytes:
    """All of a memory file, which is closed."""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RemoteProtocolError(f"{who} sent something else in place of a memory file")
        if found.st_size > MAX_BODY_BYTES:
            raise RemoteProtocolError(
                f"{who} sent a message of {found.st_size} bytes: at most {MAX_BODY_BYTES} are allowed"
            )
        return os.pread(descriptor, found.st_size, 0)
    except OSError as error:
        raise RemoteProtocolError(f"{who} sent a memory file that cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)


def line_pair(who: str) -> tuple[Line, Line]:
    """The two ends of a line inside one process."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Line(left, who), Line(right, who)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user, as the kernel says (SO_PEERCRED)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(packed)
    return bool(uid == os.geteuid())


Awaited = TypeVar("Awaited", bound=Line | Flag | socket.socket)


def wait(lines: Collection[Awaited], until_s: float, stop: Flag | None = None) -> list[Awaited]:
    """The lines on which something has come (a message, or the end), and flags; none when the deadline has passed.

    Args:
        lines: any number.
        until_s: on the monotonic clock.
        stop: ends the wait.

    Raises:
        Interrupted: by ``stop``.
    """
    if closed := [line for line in lines if line.fileno() < 0]:
        return closed  # by this side, whose next attempt to receive will say so
    waited: list[tuple[Line | Flag | socket.socket, int]] = [(line, select.POLLIN) for line in lines]
    ready = _poll([*waited, (stop, select.POLLIN)] if stop is not None else waited, until_s)
    if stop is not None and stop.fileno() in ready:
        raise Interrupted
    return [line for line in lines if line.fileno() in ready]


def _poll(waited: Sequence[tuple[Line | Flag | socket.socket, int]], until_s: float) -> dict[int, int]:
    """What has happened, by descriptor; empty when the deadline has passed."""
    poller = select.poll()
    for each, events in waited:
        poller.register(each.fileno(), events)
    return dict(poller.poll(max(0.0, until_s - time.monotonic()) * 1000))
