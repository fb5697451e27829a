"""What stands between the network and the gRPC server: who knocks, and who has to go.

gRPC says nothing of connections that never become a call: one that sends rubbish, half a handshake or nothing at all is
ended by it in its own time, and nobody hears from where it came. So every connection is accepted here, passed on to the
server byte by byte, and cut when its bearer has not shown a token in time. Nothing is read or changed on the way but
the first bytes.

The server listens on a Unix socket of this machine, which costs less than the loopback interface. This end of such a
connection has a name of its own, by which the server tells it from others.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable

from keepstep.errors import ConfigurationError

ADMISSION_S = 10.0
"""How long it may take to show a token: a handshake and a call, over a slow network."""
MAX_STRANGERS = 1024
"""Connections that have not shown a token. Of more agents than that, those that come too early come again."""
HIGH_WATER_BYTES = 1 << 20
READ_BYTES = 1 << 16
"""At a time, into one buffer for all: asyncio's own way takes a fresh 256 KiB from the kernel for each read, and five
times as long."""
TLS_HANDSHAKE = b"\x16\x03"
"""RFC 8446, section 5.1: the type of a handshake record, and the first byte of its version."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113, section 3.4."""

OnRefused = Callable[[str, str], None]


class Gate:
    """Accepts connections on one address, for a server on this machine."""

    def __init__(self, on_refused: OnRefused) -> None:
        """Args:
        on_refused: told of whoever was sent away: its address, and why.
        """
        self.on_refused = on_refused
        self._strangers: set[_Front] = set()
        self._passages: dict[str, _Front] = {}
        """By the name from which it was passed on: that is what the server behind sees."""
        self._key = secrets.token_hex(16)
        self._num_passed = 0
        self._ends: set[_End] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._server: asyncio.Server | None = None

    @property
    def inner(self) -> str:
        """The abstract name on which the server is to listen."""
        return f"keepstep-{self._key}"

    async def open(self, host: str, port: int, *, is_tls: bool) -> int:
        """Listens, and returns the port.

        Args:
            host: the address, of one interface.
            port: 0 for any free one.
            is_tls: whether a connection has to begin with a TLS handshake, or with HTTP/2.

        Raises:
            ConfigurationError: the address cannot be had.
        """
        first = TLS_HANDSHAKE if is_tls else HTTP2_PREFACE
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Front(self, first), host, port, backlog=4096)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listens no more; connections that were let in go on."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            stranger.is_known = True
            stranger.cut()

    async def ended(self, deadline_s: float) -> None:
        """Waits until no connection is left; after so many seconds those that are left are cut, which takes no time."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._is_empty.wait()
            for end in self._ends:
                end.cut()

    def admit(self, name: str) -> None:
        """The connection that the server sees coming from this name is known by now."""
        if name in self._passages:
            self._strangers.discard(self._passages[name])
            self._passages[name].is_known = True

    def address_of(self, name: str) -> str:
        """From where a connection really comes that the server sees coming from this name."""
        front = self._passages.get(name)
        return front.address if front is not None else f"this machine ({name})"

    # ---- what the connections call ----------------------------------------------------------------------------------

    def came(self, end: _End) -> None:
        """There is one more end of a connection."""
        self._ends.add(end)
        self._is_empty.clear()

    def has_room(self, front: _Front) -> bool:
        """Whether there is room for one more whom nobody knows."""
        if len(self._strangers) >= MAX_STRANGERS:
            self.on_refused(front.address, f"{MAX_STRANGERS} others have not shown a token yet")
            return False
        self._strangers.add(front)
        return True

    def way_in(self, front: _Front) -> tuple[socket.socket, str]:
        """A connection to the server, and its name.

        Raises:
            OSError: the server is gone, or does not keep up.
        """
        self._num_passed += 1
        name = f"{self.inner}-{self._num_passed}"
        way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            way.bind(f"\0{name}")
            way.connect(f"\0{self.inner}")  # at once, or not at all
        except OSError:
            way.close()
            raise
        self._passages[name] = front
        return way, name

    def out(self, front: _Front, name: str | None) -> None:
        """Who was at the front has gone."""
        self._strangers.discard(front)
        if name is not None:
            self._passages.pop(name, None)

    def went(self, end: _End) -> None:
        """An end is closed."""
        self._ends.discard(end)
        if not self._ends:
            self._is_empty.set()


class _End(asyncio.BufferedProtocol):
    """One end of a connection that is passed on: what comes here goes out at the other end."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._gate.came(self)
        self.other: _End | None = None
        self._transport: asyncio.Transport | None = None

    def is_open(self) -> bool:
        """Whether somebody is there."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._gate.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.read(bytes(self._gate.buffer[:nbytes]))

    def read(self, data: bytes) -> None:
        """Something was read here."""
        if self.other is not None:
            self.other.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._gate.went(self)
        if self.other is not None:
            self.other.end()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume()

    def write(self, data: bytes) -> None:
        """What has come at the other end."""
        if self._transport is not None:
            self._transport.write(data)

    def pause(self) -> None:
        """The other end does not keep up."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """The other end has caught up."""
        if self._transport is not None:
            self._transport.resume_reading()

    def end(self) -> None:
        """Ends it, after what is still to be written."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Ends it at once."""
        if self._transport is not None:
            self._transport.abort()


class _Front(_End):
    """The end that is turned to the network; the other one is turned to the server."""

    def __init__(self, gate: Gate, first: bytes) -> None:
        super().__init__(gate)
        self._first = first
        self._begun = b""
        self._timer: asyncio.TimerHandle | None = None
        self._passing: asyncio.Task[None] | None = None
        self._name: str | None = None
        self.address = "?"
        self.is_known = False
        """Its bearer has shown a token, or it has been told why it was sent away."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        host, port = transport.get_extra_info("peername")[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._gate.has_room(self):
            self._timer = asyncio.get_running_loop().call_later(ADMISSION_S, self._is_late)
        else:
            self.is_known = True
            self.cut()

    def read(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)
            return
        self._begun += data
        seen = self._begun[: len(self._first)]
        if seen != self._first[: len(seen)]:
            self._refuse(f"it began with {self._begun[:16]!r}, which is no handshake")
        elif len(seen) == len(self._first) and self._passing is None:
            self.pause()
            self._passing = asyncio.get_running_loop().create_task(self._pass_on())

    async def _pass_on(self) -> None:
        if not self.is_open():
            return
        try:
            way, self._name = self._gate.way_in(self)
        except OSError:
            self.cut()  # the server behind is gone, and so is this
            return
        inner, back = await asyncio.get_running_loop().create_unix_connection(lambda: _End(self._gate), sock=way)
        if not self.is_open():  # it went meanwhile
            inner.close()
            return
        back.other, self.other = self, back
        back.write(self._begun)
        self._begun = b""
        self.resume()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._timer is not None:
            self._timer.cancel()
        self._gate.out(self, self._name)
        if not self.is_known:
            self._tell("its handshake failed, or it went before it had shown a token")

    def _is_late(self) -> None:
        if not self.is_known:
            said = "nothing" if not self._begun and self.other is None else "no token"
            self._refuse(f"it has shown {said} within {ADMISSION_S:g} s")

    def _refuse(self, why: str) -> None:
        self._tell(why)
        self.cut()

    def _tell(self, why: str) -> None:
        self.is_known = True  # once is enough
        self._gate.on_refused(self.address, why)
