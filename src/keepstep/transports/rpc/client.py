"""The agent's end of the gRPC transport: one connection to the controller, reconnected as often as needed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from keepstep.errors import ConfigurationError, PeerLost
from keepstep.protocol.messages import AnyMessage
from keepstep.transports.framing import frame
from keepstep.transports.interface import PATIENCE_S, Connected
from keepstep.transports.rpc.wire import AUTHORIZATION, BEARER, OPEN, PATH, SETTINGS, Outbox, messages_in
from keepstep.trust.certificates import CONTROLLER_NAME
from keepstep.trust.credentials import Credentials

CONNECT_S = 5.0
"""How long one attempt to connect may take."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 0.5
"""Pause between two attempts. It doubles at each attempt, and a random part of up to the same length is added, so that
not all agents connect at once."""
MAX_UNSENT_BYTES = 64 << 20
"""While a connection does not transmit, the agent keeps no more than this. It drops further messages; the reliable
channel sends them again."""

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class RpcControllerConnection:
    """Implements `keepstep.transports.interface.ControllerConnection`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credentials: Credentials,
        host_name: str | None = CONTROLLER_NAME,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Args:
        endpoints: HOST:PORT of each possible controller. The agent tries all, and uses the first that answers.
        credentials: credentials of this node's agent.
        host_name: host name in the controller's certificate; None: the certificate contains its address.
        patience_s: how long the agent may be without a connection, in seconds.
        """
        self._endpoints = tuple(endpoints)
        self._credentials = credentials
        self._host_name = host_name
        self._patience_s = patience_s
        self._outbox = Outbox()
        self._has_news = asyncio.Event()
        self._no_connection = asyncio.Event()
        self._no_connection.set()
        self._arrived: asyncio.Queue[AnyMessage | Connected] = asyncio.Queue()
        self._num_served = 0
        """Number of connections that ended without a refusal by the controller."""
        self.has_opened = False
        """Whether there was ever a connection."""
        self._term = 0
        """The highest term of a controller that was ever reached."""
        self._closing = asyncio.Event()
        self.on_trouble: Callable[[str], None] = lambda why: None
        """Called with the reason why there is no connection, each time that the reason changes for an endpoint."""

    # ---- ControllerConnection ----------------------------------------------------------------------------------------

    def send(self, message: AnyMessage) -> None:
        """Sends a message; drops it if there is no connection."""
        if not self._no_connection.is_set() and self._outbox.num_bytes < MAX_UNSENT_BYTES:
            self._outbox.put(frame(message))
            self._has_news.set()

    async def receive(self) -> AnyMessage | Connected:
        """Waits for the next message and returns it."""
        return await self._arrived.get()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps a connection open until `close` is called, or the task is cancelled.

        Raises:
            ConfigurationError: the controller refuses this agent's token, and has never accepted it; or the only
                endpoint is that of another job.
            PeerLost: there was no connection for ``patience_s``.
        """
        self._lost_s = time.monotonic()
        keeping = [asyncio.create_task(self._keep(endpoint)) for endpoint in self._endpoints]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def close(self) -> None:
        """Ends the connection: `run` returns when all messages are sent, or cannot be sent."""
        self._closing.set()
        self._has_news.set()

    async def _keep(self, endpoint: str) -> None:
        """Keeps a connection to one endpoint while there is none to another."""
        pause_s, last_trouble = FIRST_PAUSE_S, None
        while not self._closing.is_set():
            num_served = self._num_served
            trouble = await self._visit(endpoint)
            if self._closing.is_set():
                return
            if trouble not in (None, last_trouble):
                self.on_trouble(trouble)
                last_trouble = trouble
            if self._no_connection.is_set() and time.monotonic() > self._lost_s + self._patience_s:
                raise PeerLost(f"no controller was reachable for {self._patience_s:g} s; {trouble}")
            pause_s = FIRST_PAUSE_S if self._num_served > num_served else min(2 * pause_s, LAST_PAUSE_S)
            await asyncio.sleep(pause_s * (1 + random.random()))
            await self._no_connection.wait()

    async def _visit(self, endpoint: str) -> str | None:
        """Opens one connection and serves it to its end. Returns why it ended; None if another endpoint was faster."""
        async with self._channel(endpoint) as channel:
            call: Call = channel.stream_stream(PATH)(metadata=((AUTHORIZATION, BEARER + self._credentials.token),))
            try:
                async with asyncio.timeout(CONNECT_S):
                    metadata = dict(await call.initial_metadata())
                    is_open = OPEN in metadata
                    refusal = None if is_open else await call.code()
                if refusal is grpc.StatusCode.UNAUTHENTICATED and not self.has_opened:
                    raise ConfigurationError(f"the controller at {endpoint} refuses: {await call.details()}")
                if is_open and not self._no_connection.is_set():
                    return None
                if is_open:
                    term = int(metadata[OPEN])
                    if term < self._term:
                        return f"{endpoint}: serves no more: its term is {term}, and {self._term} has begun"
                    self._term = term
                    await self._converse(call)
                return self._trouble(endpoint, await call.details() or "the controller has ended the connection")
            except TimeoutError:
                return f"{endpoint}: no answer within {CONNECT_S:g} s"
            except grpc.aio.AioRpcError as error:
                return self._trouble(endpoint, error.details() or "")
            finally:
                call.cancel()

    def _trouble(self, endpoint: str, details: str) -> str:
        """Returns why there is no connection, from gRPC's text. Raises if it can never be one."""
        if not _is_of_another_job(details):
            return f"{endpoint}: {details}"
        if len(self._endpoints) == 1 and not self.has_opened:
            raise ConfigurationError(
                f"the certificate of the controller at {endpoint} is not of this job: this node's token or secret "
                "belongs to another job, or another job's controller listens there. All tokens of a job are made with "
                "one secret: compare it, and the endpoint (with --tls FILES, the authority)"
            )
        return f"{endpoint}: its certificate is not of this job: {details}"

    async def _converse(self, call: Call) -> None:
        """Reads and writes until either end closes the stream."""
        self.has_opened = True
        self._outbox = Outbox()
        self._no_connection.clear()
        self._arrived.put_nowait(Connected())
        reading = asyncio.create_task(self._read(call))
        writing = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.is_set() and writing.done():
                await asyncio.wait({reading}, timeout=CONNECT_S)  # the controller ends its side when it has read all
        finally:
            self._no_connection.set()
            for task in (reading, writing):
                task.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
        if not (call.done() and await call.code() is grpc.StatusCode.INVALID_ARGUMENT):
            self._num_served += 1
            self._lost_s = time.monotonic()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self, call: Call) -> None:
        while True:
            data: Any = await call.read()
            if data is grpc.aio.EOF:
                return
            for message in messages_in(data):
                self._arrived.put_nowait(message)

    async def _write(self, call: Call) -> None:
        while True:
            while data := self._outbox.take():
                await call.write(data)
            if self._closing.is_set():
                await call.done_writing()
                return
            await self._has_news.wait()
            self._has_news.clear()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        settings: list[tuple[str, int | str]] = [
            *SETTINGS,
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),  # share no connection state with other channels
            ("grpc.min_reconnect_backoff_ms", round(1000 * CONNECT_S)),
        ]
        authority = self._credentials.authority
        if authority is None:
            return grpc.aio.insecure_channel(endpoint, settings)
        if self._host_name is not None:
            settings.append(("grpc.ssl_target_name_override", self._host_name))
        return grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(authority), settings)


def _is_of_another_job(details: str) -> bool:
    """Returns whether TLS has failed because another authority than this job's has signed the certificate.

    A clock that is wrong by more than a day makes a certificate invalid, too, and may be set right.
    """
    return "CERTIFICATE_VERIFY_FAILED" in details and "expired" not in details and "not yet valid" not in details
