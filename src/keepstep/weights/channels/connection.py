"""A connection between two processes of one node: typed messages and file descriptors over a Unix socket.

The socket preserves packet boundaries (SOCK_SEQPACKET). A message that is too long for a packet travels in a memory
file whose descriptor is sent instead. Nothing here blocks without a deadline.
"""

from __future__ import annotations

import array
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from keepstep.cancel import Cancelled, CancelToken
from keepstep.errors import BufferUnavailable, PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import MAX_BODY_BYTES, AnyTransferMessage, PathLost, decode, encode
from keepstep.systemcalls import memory_file

INLINE_BYTES = 1 << 15
"""Longer messages travel in a file. Well below the 208 KiB that Linux lets a socket hold."""
MAX_DESCRIPTORS = 2
_INT_BYTES = array.array("i").itemsize
_INLINE, _IN_FILE = b"m", b"f"
_CREDENTIALS = struct.Struct("iII")


class ConnectionLost(PeerLost):
    """The connection cannot be used any more. ``what`` is the reason, without the name of the peer."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(f"{who} {what}")
        self.what = what


class ConnectionEnded(ConnectionLost):
    """The peer has closed the connection, or its process has ended."""


class ConnectionStalled(ConnectionLost):
    """The peer did not read or send anything within the deadline."""


def what_of(error: Exception) -> str:
    """The reason of an error, for a message that already names the peer."""
    return error.what if isinstance(error, ConnectionLost) else str(error)


class Connection:
    """One end. One thread may send while another receives; not more of either."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        """Args:
        sock: connected; the connection owns it.
        who: name of the peer, for messages.
        """
        self.who = who
        sock.setblocking(False)
        self._sock = sock
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """For `wait`."""
        return self._sock.fileno()

    def send(self, message: AnyTransferMessage, until_s: float, descriptors: Sequence[int] = ()) -> None:
        """Sends a message; the caller keeps its own copies of the descriptors.

        Raises:
            ConnectionEnded, ConnectionStalled: the message could not be sent.
            BufferUnavailable: the message does not fit into the memory available to this process.
        """
        body = encode(message)
        if len(body) <= INLINE_BYTES:
            self._send(_INLINE + body, descriptors, until_s)
            return
        with open(memory_file("message"), "wb", buffering=0) as file:
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
                self._sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                if not _poll([(self, select.POLLOUT)], until_s):
                    raise ConnectionStalled(self.who, "reads nothing") from None
            except OSError as error:
                raise ConnectionEnded(self.who, f"has closed the connection ({error.strerror})") from None

    def receive(self, until_s: float) -> AnyTransferMessage:
        """The next message. Descriptors that came with it wait in `take_descriptor`.

        Raises:
            ConnectionEnded, ConnectionStalled: no message arrived.
            RemoteProtocolError: the peer sent something that is no message.
        """
        while True:
            message = self.receive_now()
            if message is not None:
                return message
            if not _poll([(self, select.POLLIN)], until_s):
                raise ConnectionStalled(self.who, "says nothing")

    def receive_now(self) -> AnyTransferMessage | None:
        """The next message, if one is there; see `receive`."""
        try:
            packet, rights = self._receive_packet()
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionEnded(self.who, f"has closed the connection ({error.strerror})") from None
        descriptors = _descriptors_in(rights)
        try:
            message = self._message(packet, descriptors)
        except BaseException:  # the descriptors came with an invalid message
            _close_all(descriptors)
            raise
        self._descriptors += descriptors
        if isinstance(message, PathLost):  # from the proxy: the process behind it is gone
            raise ConnectionEnded(self.who, message.reason)
        return message

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        rooms = INLINE_BYTES + 1, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        try:
            packet, rights, _flags, _address = self._sock.recvmsg(*rooms)
        except ConnectionResetError:
            # The peer closed with unread packets. Linux reports this once; the packets that it sent can still be read.
            packet, rights, _flags, _address = self._sock.recvmsg(*rooms)
        return packet, rights

    def _message(self, packet: bytes, descriptors: list[int]) -> AnyTransferMessage:
        """What a packet says; takes its own descriptor out of the list."""
        if not packet:
            raise ConnectionEnded(self.who, "has closed the connection")
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
        return self._sock.fileno() < 0

    @property
    def has_ended(self) -> bool:
        """Whether one of the ends is closed. Messages that the peer sent before may still be readable."""
        if self.is_closed:
            return True
        return any(event & (select.POLLHUP | select.POLLERR) for event in _poll([(self, 0)], 0.0).values())

    def hang_up(self) -> None:
        """Shuts the connection down. All threads that wait on it, at both ends, return. Any thread may call it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. May be called several times."""
        _close_all(self._descriptors)
        self._descriptors = []
        self._sock.close()


def _descriptors_in(rights: list[tuple[int, int, bytes]]) -> list[int]:
    """As `socket.recv_fds`, which does not support the needed flags."""
    found = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_file(descriptor: int, who: str) -> bytes:
    """Reads a memory file completely, and closes it."""
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


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user, as the kernel says (SO_PEERCRED)."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(packed)
    return bool(uid == os.geteuid())


Awaited = TypeVar("Awaited", bound=Connection | CancelToken | socket.socket)


def wait(connections: Collection[Awaited], until_s: float, stop: CancelToken | None = None) -> list[Awaited]:
    """Waits until a connection has a message or has ended, or until a token is set.

    Args:
        connections: the connections, sockets and tokens to wait for.
        until_s: deadline on the monotonic clock.
        stop: cancels the wait.

    Returns:
        those that are ready; empty if the deadline has passed.

    Raises:
        Cancelled: ``stop`` was set.
    """
    if closed := [connection for connection in connections if connection.fileno() < 0]:
        return closed  # closed by this side: the next receive raises
    waited: list[tuple[Connection | CancelToken | socket.socket, int]] = [
        (connection, select.POLLIN) for connection in connections
    ]
    ready = _poll([*waited, (stop, select.POLLIN)] if stop is not None else waited, until_s)
    if stop is not None and stop.fileno() in ready:
        raise Cancelled
    return [connection for connection in connections if connection.fileno() in ready]


def _poll(waited: Sequence[tuple[Connection | CancelToken | socket.socket, int]], until_s: float) -> dict[int, int]:
    """What has happened, by descriptor; empty when the deadline has passed."""
    poller = select.poll()
    for each, events in waited:
        poller.register(each.fileno(), events)
    return dict(poller.poll(max(0.0, until_s - time.monotonic()) * 1000))
