"""The controller's end of the gRPC transport: a server on one address, with a connection to each agent.

gRPC itself closes connections that never become a call. It closes one that does not begin with a handshake at once, an
unfinished handshake after `ADMISSION_S`, a connection without a call after the same time again, and connections beyond
`num_connections` right after it has accepted them. Connections without a token have a lower limit of their own, see
`keepstep.transports.rpc.strangers`. ``benchmarks/strangers.py`` measures the effect of such connections on agents; the
results are in ``benchmarks/results``. gRPC does not report their addresses.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from keepstep.errors import ConfigurationError, RemoteProtocolError, TokenRefused
from keepstep.protocol.messages import AnyMessage, printable
from keepstep.systemcalls import open_files
from keepstep.transports.codec import encode
from keepstep.transports.framing import framed
from keepstep.transports.interface import Arrival, Connected
from keepstep.transports.rpc.directory import METHOD as DIRECTORY_METHOD
from keepstep.transports.rpc.directory import WeightsDirectory
from keepstep.transports.rpc.strangers import LOOK_S, StrangerLimit
from keepstep.transports.rpc.wire import METHOD, OPEN, SERVICE, SETTINGS, Outbox, address_of, bearer_in, messages_in
from keepstep.trust.certificates import ServerFiles

MAX_UNREAD_BYTES = 64 << 20
"""Most bytes that wait for an agent that does not read. The server closes its connection then; a new connection starts
over."""
MAX_ARRIVED = 4096
"""Most messages that wait for the controller. When there are as many, gRPC's flow control makes the agents wait."""
STOP_S = 0.5
ADMISSION_S = 10.0
"""How long a handshake may take over a slow network, and how long a connection may be open without a call."""
MAX_CONNECTIONS = 4096
"""Most connections of agents. A silent connection takes about 20 KB."""
MAX_STRANGERS = 1024
"""Most connections of clients that have not shown a token, apart from those. For further ones, old ones are closed."""
OTHER_DESCRIPTORS = 256
"""File descriptors that the controller reserves for the journal, its stores and its status socket."""

Admit = Callable[[str], str]
"""Returns the node of a token; raises `TokenRefused`."""
OnRefused = Callable[[str, str], None]
"""Called with the address of each refused client, and the reason."""
Context = grpc.aio.ServicerContext[bytes, bytes]


class _Visit:
    """One connection of one node's agent."""

    def __init__(self, node: str, address: str) -> None:
        self.node = node
        self.address = address
        self.outbox = Outbox()
        self.has_news = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to the reason when the server must close the connection."""

    def end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


class RpcNodeConnections:
    """Implements `keepstep.transports.interface.NodeConnections`."""

    def __init__(
        self, admit: Admit, on_refused: OnRefused, term: int = 0, directory: WeightsDirectory | None = None
    ) -> None:
        """Args:
        admit: checks a token, and returns its node.
        on_refused: called for each refused client.
        term: term of this controller's lease.
        directory: answers calls for the nodes that publish weights; None: the server does not offer that call.
        """
        self._directory = directory
        if directory is not None:
            directory.on_admitted = self._was_called
        self._admit = admit
        self._term = term
        self._on_refused = on_refused
        self._server: grpc.aio.Server | None = None
        self._strangers: StrangerLimit | None = None
        self._looking: asyncio.Task[None] | None = None
        self._visits: dict[str, _Visit] = {}
        self._arrived: asyncio.Queue[Arrival] = asyncio.Queue(MAX_ARRIVED)

    async def start(self, host: str, port: int, tls: ServerFiles | None, *, is_shared: bool = False) -> int:
        """Starts to listen, and returns the port.

        Args:
            host: address of one interface.
            port: the port; 0 for any free one.
            tls: key and certificate; None: no encryption.
            is_shared: relays of the controller listen on the same port (``SO_REUSEPORT``).

        Raises:
            ConfigurationError: the address is not available.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not is_shared:
            free_address(host, port).close()  # this error names the reason; gRPC's does not
        server = grpc.aio.server(options=[*_settings(), ("grpc.so_reuseport", int(is_shared))])
        method: Any = grpc.stream_stream_rpc_method_handler(self._converse)
        methods = {METHOD: method} | ({} if self._directory is None else {DIRECTORY_METHOD: self._directory.handler})
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            if tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, grpc.ssl_server_credentials([(tls.key, tls.certificate)]))
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
        await server.start()
        self._server = server
        self._strangers = StrangerLimit(int(bound), num_strangers())
        self._looking = asyncio.create_task(_keep_room(self._strangers))
        return int(bound)

    async def stop(self) -> None:
        """Stops listening, and closes all connections within `STOP_S`."""
        if self._looking is not None:
            self._looking.cancel()
            _tell_unforeseen(await asyncio.gather(self._looking, return_exceptions=True), "the limit of strangers")
        if self._server is not None:
            await self._server.stop(STOP_S)

    # ---- NodeConnections ---------------------------------------------------------------------------------------------

    def send(self, node: str, message: AnyMessage) -> None:
        """Sends a message; drops it if there is no connection to the node."""
        self.send_encoded(node, encode(message))

    def send_encoded(self, node: str, message: bytes) -> None:
        """Sends an encoded message; drops it if there is no connection to the node."""
        visit = self._visits.get(node)
        if visit is None:
            return
        visit.outbox.put(framed(message))
        visit.has_news.set()
        if visit.outbox.num_bytes > MAX_UNREAD_BYTES:
            visit.end(f"it has not read {visit.outbox.num_bytes} bytes")

    async def receive(self) -> Arrival:
        """Waits for the next message of any node and returns it."""
        return await self._arrived.get()

    def more(self) -> Arrival | None:
        """Returns the next message that has arrived; None if there is none."""
        return None if self._arrived.empty() else self._arrived.get_nowait()

    def refuse(self, node: str, why: str) -> None:
        """Closes the connection to a node that has broken the protocol."""
        if (visit := self._visits.get(node)) is not None:
            visit.end(why)

    # ---- one connection ---------------------------------------------------------------------------------------------

    async def _converse(self, _requests: AsyncIterable[bytes], context: Context) -> None:
        address = address_of(context.peer())
        try:
            node = self._admit(bearer_in(context.invocation_metadata()))
        except TokenRefused as error:
            self._on_refused(address, str(error))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        visit = _Visit(node, address)
        if (former := self._visits.get(node)) is not None:
            former.end("its agent has connected again")
        self._visits[node] = visit
        if self._strangers is not None:
            self._strangers.admit(address)
        try:
            why = await self._serve(visit, context)
        finally:
            if self._strangers is not None:
                self._strangers.forget(address)
            if self._visits.get(node) is visit:
                del self._visits[node]
        if why:
            self._on_refused(address, f"node {node}: {why}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)

    async def _serve(self, visit: _Visit, context: Context) -> str:
        """Reads and writes until either end closes the stream. Returns the reason if this end does, else ""."""
        await context.send_initial_metadata(((OPEN, str(self._term)),))
        await self._arrived.put(Arrival(visit.node, Connected()))
        reading = asyncio.create_task(self._read(visit, context))
        writing = asyncio.create_task(_write(visit, context))
        try:
            waited: set[asyncio.Future[Any]] = {reading, writing, visit.ended}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            ends = await asyncio.gather(reading, writing, return_exceptions=True)
            _tell_unforeseen(ends, f"the connection to node {visit.node}")
        return visit.ended.result() if visit.ended.done() else ""

    def _was_called(self, address: str) -> None:
        """Records a call with a valid token on a connection that may stay open without a call for a while."""
        if self._strangers is not None:
            self._strangers.admit(address, time.monotonic() + ADMISSION_S)

    async def _read(self, visit: _Visit, context: Context) -> None:
        while True:
            data: Any = await context.read()
            if data is grpc.aio.EOF:
                return
            try:
                found = messages_in(data)
            except RemoteProtocolError as error:
                visit.end(str(error))
                return
            for message in found:
                await self._arrived.put(Arrival(visit.node, message))


def free_address(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Binds a socket to an address, to show that the address is available.

    Args:
        host: address of one interface.
        port: the port; 0 for any free one.
        is_shared: the socket does not listen, and other sockets may share the port (``SO_REUSEPORT``).

    Raises:
        ConfigurationError: the address is not available.
    """
    try:
        if not is_shared:
            return socket.create_server((host, port), family=_family(host))
        bound = socket.socket(_family(host))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _settings() -> list[tuple[str, int]]:
    return [
        *SETTINGS,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.server_handshake_timeout_ms", round(1000 * ADMISSION_S)),
        ("grpc.max_connection_idle_ms", round(1000 * ADMISSION_S)),
        ("grpc.max_allowed_incoming_connections", num_connections()),
    ]


def num_connections() -> int:
    """Returns how many connections the server accepts in all, which may be fewer by the limit on open files."""
    return max(2, min(MAX_CONNECTIONS + MAX_STRANGERS, open_files() - OTHER_DESCRIPTORS))


def num_strangers() -> int:
    """Returns how many of these connections may be open without having shown a token."""
    return max(1, num_connections() * MAX_STRANGERS // (MAX_CONNECTIONS + MAX_STRANGERS))


async def _keep_room(strangers: StrangerLimit) -> None:
    while True:
        strangers.look(time.monotonic())
        await asyncio.sleep(LOOK_S)


def _tell_unforeseen(ends: Iterable[object], of_what: str) -> None:
    """Prints exceptions that are neither a cancellation nor the end of a connection: they are bugs."""
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, grpc.aio.BaseError):
            story = printable("".join(traceback.format_exception(end)))
            print(f"keepstep: an error has ended {of_what}:\n{story}", file=sys.stderr, flush=True)


async def _write(visit: _Visit, context: Context) -> None:
    while True:
        await visit.has_news.wait()
        visit.has_news.clear()
        while data := visit.outbox.take():
            await context.write(data)
