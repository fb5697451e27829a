"""One TCP connection, plain or with TLS: whole messages and whole buckets, with a deadline for each."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.weights.channels.connection import ConnectionEnded, ConnectionStalled
from keepstep.weights.remote.messages import LENGTH, MAX_MESSAGE_BYTES, AnyLinkMessage, decode, encode

CONNECT_S = 5.0
"""Timeout for opening a connection and authenticating both ends."""
NEVER_S = float("inf")
CHUNK_BYTES = 1 << 20
"""Bytes for which memory is allocated before they have come."""


class ByteStream:
    """One end. One thread may send while another receives; not more of either."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        """Args:
        sock: connected; the stream owns it.
        who: name of the peer, for messages.
        """
        self.who = who
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._turn = threading.Lock()
        """With TLS, sending and receiving share state (OpenSSL: an SSL object is for one thread at a time)."""

    def send_message(self, message: AnyLinkMessage, until_s: float = NEVER_S) -> None:
        """Sends one message. Raises as `send`."""
        body = encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ConfigurationError(f"a message of {len(body)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
        self.send([LENGTH.pack(len(body)), body], until_s)

    def receive_message(self, until_s: float = NEVER_S, max_bytes: int = MAX_MESSAGE_BYTES) -> AnyLinkMessage:
        """The next message.

        Raises:
            ConnectionEnded, ConnectionStalled: no message arrived.
            RemoteProtocolError: the peer sent something that is no message, or is larger than ``max_bytes``.
        """
        head = bytearray(LENGTH.size)
        self.receive_into(memoryview(head), until_s)
        (length,) = LENGTH.unpack(head)
        if length > max_bytes:
            raise RemoteProtocolError(f"{self.who} sent a message of {length} bytes: at most {max_bytes} are allowed")
        body = bytearray()
        while len(body) < length:  # memory for what has come, not for what a peer says will come
            chunk = bytearray(min(length - len(body), CHUNK_BYTES))
            self.receive_into(memoryview(chunk), until_s)
            body += chunk
        return decode(body)

    def send(self, parts: Sequence[bytes | memoryview], until_s: float = NEVER_S) -> None:
        """Sends all parts.

        Raises:
            ConnectionEnded, ConnectionStalled: not all could be sent.
        """
        for part in parts:
            rest = memoryview(part)
            while rest:
                try:
                    with self._turn:
                        rest = rest[self._sock.send(rest) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    self._wait(select.POLLOUT, until_s, "reads nothing")
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN, until_s, "reads nothing")
                except (OSError, ValueError) as error:
                    raise self._ended(error) from None

    def receive_into(self, view: memoryview, until_s: float = NEVER_S) -> None:
        """Receives until ``view`` is full.

        Raises:
            ConnectionEnded, ConnectionStalled: fewer bytes arrived.
        """
        while view:
            try:
                with self._turn:
                    num_bytes = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, until_s, "says nothing")
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, until_s, "says nothing")
                continue
            except (OSError, ValueError) as error:
                raise self._ended(error) from None
            if not num_bytes:
                raise ConnectionEnded(self.who, "has closed the connection")
            view = view[num_bytes:]

    def drop(self, num_bytes: int, until_s: float = NEVER_S) -> None:
        """Receives bytes that nobody wants. Raises as `receive_into`."""
        scratch = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, CHUNK_BYTES)]
            self.receive_into(part, until_s)
            num_bytes -= len(part)

    def hang_up(self) -> None:
        """Shuts the connection down. All threads that wait on it, at both ends, return. Any thread may call it."""
        with contextlib.suppress(OSError, ValueError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. No other thread may use it any more. May be called several times."""
        self._sock.close()

    def _ended(self, error: Exception) -> ConnectionEnded:
        return ConnectionEnded(self.who, f"has closed the connection ({getattr(error, 'strerror', None) or error})")

    def _wait(self, event: int, until_s: float, what: str) -> None:
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError as error:
            raise self._ended(error) from None
        timeout_ms = None if until_s == NEVER_S else max(0.0, until_s - time.monotonic()) * 1000
        if not poller.poll(timeout_ms):
            raise ConnectionStalled(self.who, what)


def split_address(address: str) -> tuple[str, int]:
    """Splits ``HOST:PORT`` into host and port. An IPv6 address must be in brackets.

    Raises:
        ConfigurationError: ``address`` does not have this form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"address {address!r}: must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def connect(address: str, until_s: float) -> socket.socket:
    """Opens a TCP connection. Raises ConnectionStalled on failure."""
    host, port = split_address(address)
    try:
        return socket.create_connection((host, port), max(0.01, until_s - time.monotonic()))
    except OSError as error:
        raise ConnectionStalled(address, f"cannot be reached ({error.strerror or error})") from None
