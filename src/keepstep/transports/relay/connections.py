"""The controller's end of its relays: it starts them, routes packets to nodes, and replaces relays that end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from keepstep.background import BackgroundTasks
from keepstep.errors import ConfigurationError, RemoteProtocolError
from keepstep.programs import ending, own_command
from keepstep.protocol.messages import AnyMessage
from keepstep.protocol.relay.bundle import Item, NodeConnected, NodeSaid, PacketBundle
from keepstep.protocol.relay.gathering import SILENT_S
from keepstep.protocol.transfer.directory import PublishingNode
from keepstep.transports.interface import Arrival, Connected, RelayLost
from keepstep.transports.relay import wire
from keepstep.transports.relay.pipe import Pipe
from keepstep.transports.rpc.server import OnRefused, free_address
from keepstep.trust.certificates import ServerFiles
from keepstep.trust.tokens import Secret

START_S = 60.0
"""How long all relays together may take to start."""
LOOK_S = 0.25
"""Interval at which the controller looks for silent relays."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 5.0
"""Pause before a relay that has ended is started again. It doubles each time that the relay does not come up."""
END_S = 2.0
"""How long a relay may take to end after the controller has closed its pipe."""
PROGRAM = "keepstep.controller.relay"


class _Relay:
    """One relay process, and its outgoing messages."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.process = process
        self.pipe = pipe
        self.heard_s = time.monotonic()
        self.is_ready = False
        self.num_unread = 0
        """Number of items of its last frame that the controller has not taken yet."""
        self.owes_taken = False
        self.bundles: list[wire.EncodedBundle] = []
        self.others: list[NodeSaid] = []
        self.refused: list[tuple[str, str]] = []
        self.publishing: list[PublishingNode] = []

    def flush(self) -> None:
        """Sends all waiting messages, and the acknowledgement once the controller has taken the whole last frame."""
        has_taken, self.owes_taken = self.owes_taken and not self.num_unread, self.owes_taken and self.num_unread > 0
        if has_taken or self.bundles or self.others or self.refused or self.publishing:
            others = tuple(self.others), tuple(self.refused), tuple(self.publishing)
            self.pipe.write(wire.encode(wire.Downward(has_taken, tuple(self.bundles), *others)))
            self.bundles, self.others, self.refused, self.publishing = [], [], [], []


class RelayedNodeConnections:
    """Implements `keepstep.transports.interface.BundlingConnections`."""

    def __init__(self, num_relays: int, secret: Secret, on_refused: OnRefused, term: int = 0) -> None:
        """Args:
        num_relays: number of relay processes that share the agents.
        secret: the job's secret, with which relays check tokens.
        on_refused: called with the address of each refused client, and the reason.
        term: term of this controller's lease.
        """
        self._secret = secret
        self._on_refused = on_refused
        self._term = term
        self._relays: list[_Relay | None] = [None] * num_relays
        """The relays by number. None: the controller is about to start this relay again."""
        self._have_listened = [asyncio.Event() for _ in range(num_relays)]
        self._routes: dict[str, int] = {}
        self._arrived: asyncio.Queue[tuple[_Relay | None, Arrival] | Exception] = asyncio.Queue()
        self._is_flushing = False
        self._port: socket.socket | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._begin: wire.Begin | None = None

    async def start(self, host: str, port: int, tls: ServerFiles | None) -> int:
        """Starts the relays, waits until all of them listen, and returns the port.

        Args:
            host: address of one interface.
            port: the port; 0 for any free one.
            tls: key and certificate; None: no encryption.

        Raises:
            ConfigurationError: the address is not available, or the relays do not come up within `START_S`.
        """
        free_address(host, port).close()  # relays share the port only with each other, not with another controller
        self._port = free_address(host, port, is_shared=True)
        port = int(self._port.getsockname()[1])
        key, certificate = (None, None) if tls is None else (tls.key, tls.certificate)
        self._begin = wire.Begin(host, port, self._secret.text(), key, certificate, self._term)
        background = BackgroundTasks(self._arrived.put_nowait)
        self._keeping = [background.begin(self._keep(number)) for number in range(len(self._relays))]
        self._keeping.append(background.begin(self._watch()))
        try:
            async with asyncio.timeout(START_S):
                for has_listened in self._have_listened:
                    await has_listened.wait()
        except TimeoutError:
            await self.stop()
            raise ConfigurationError(f"the controller's relays did not start within {START_S:g} s") from None
        return port

    async def stop(self) -> None:
        """Ends all relays after they have got all waiting messages. Kills those that take longer than `END_S`."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for relay in filter(None, self._relays):
            relay.flush()
            relay.pipe.close()
        for relay in filter(None, self._relays):
            try:
                await asyncio.to_thread(relay.process.wait, END_S)
            except subprocess.TimeoutExpired:
                relay.process.kill()
                relay.process.wait()
        if self._port is not None:
            self._port.close()

    # ---- BundlingConnections ----------------------------------------------------------------------------------------

    @property
    def routes(self) -> Mapping[str, int]:
        """node -> the relay that holds its connection."""
        return self._routes

    def send(self, node: str, message: AnyMessage) -> None:
        """Sends a message; drops it if there is no connection to the node."""
        if (relay := self._relay_of(node)) is not None:
            relay.others.append(NodeSaid(node, message))
            self._flush_soon()

    def send_bundles(self, bundles: Sequence[tuple[int, PacketBundle]]) -> None:
        """Sends each relay its bundles; drops those for a relay that has ended."""
        for (number, _), encoded in zip(bundles, wire.encoded_bundles(each for _, each in bundles), strict=True):
            if (relay := self._relays[number]) is not None:
                relay.bundles.append(encoded)
        self._flush_soon()

    async def receive(self) -> Arrival:
        """Waits for the next message, of one node or bundled, and returns it."""
        return self._taken(await self._arrived.get())

    def more(self) -> Arrival | None:
        """Returns the next message that has arrived; None if there is none."""
        return None if self._arrived.empty() else self._taken(self._arrived.get_nowait())

    def refuse(self, node: str, why: str) -> None:
        """Closes the connection to a node that has broken the protocol."""
        if (relay := self._relay_of(node)) is not None:
            relay.refused.append((node, why))
            self._flush_soon()

    # ---- from and to relays -----------------------------------------------------------------------------------------

    def _relay_of(self, node: str) -> _Relay | None:
        number = self._routes.get(node)
        return None if number is None else self._relays[number]

    def _taken(self, item: tuple[_Relay | None, Arrival] | Exception) -> Arrival:
        """Counts an item as taken. The flush after the last item of a frame acknowledges the frame.

        Raises:
            Exception: the error that has ended one of the tasks here, so that the controller ends, and is restarted.
        """
        if isinstance(item, Exception):
            raise item
        relay, arrival = item
        if relay is not None:
            relay.num_unread -= 1
            self._flush_soon()
        return arrival

    def _flush_soon(self) -> None:
        """Schedules one flush after the controller's current callback, so that it covers all its messages."""
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        for relay in filter(None, self._relays):
            relay.flush()

    async def _keep(self, number: int) -> None:
        """Runs one relay, and starts it again whenever it has ended."""
        pause_s = FIRST_PAUSE_S
        while True:
            relay = self._relays[number] = await self._spawn()
            why = await self._read(number, relay)
            relay.process.kill()
            relay.pipe.close()
            code = await asyncio.to_thread(relay.process.wait)
            pause_s = FIRST_PAUSE_S if relay.is_ready else min(2 * pause_s, LAST_PAUSE_S)
            self._lose(number)
            how = why or ending(code)
            text = f"keepstep: relay {number} has ended ({how}): its agents connect to others, and it is started again"
            print(text, file=sys.stderr, flush=True)
            await asyncio.sleep(pause_s)

    async def _spawn(self) -> _Relay:
        ours, theirs = socket.socketpair()
        with theirs:
            command = own_command(PROGRAM, str(theirs.fileno()), str(os.getpid()))
            try:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: ASYNC220 - exec alone
            except OSError:
                ours.close()
                raise
        relay = _Relay(process, await Pipe.open(ours))
        assert self._begin is not None
        relay.pipe.write(wire.encode(self._begin))
        return relay

    async def _read(self, number: int, relay: _Relay) -> str:
        """Processes the frames of a relay until it has ended. Returns why the controller must end it, or ""."""
        while (data := await relay.pipe.read()) is not None:
            relay.heard_s = time.monotonic()
            try:
                frame = wire.decode_upward(data)
            except RemoteProtocolError as error:
                return str(error)
            match frame:
                case wire.Ready():
                    relay.is_ready, relay.heard_s = True, time.monotonic()
                    self._have_listened[number].set()
                case wire.ConnectionRefused():
                    self._on_refused(frame.address, frame.why)
                case wire.WeightsAnnounced(node):
                    for other in filter(None, self._relays):
                        if other is not relay:
                            other.publishing.append(node)
                    self._flush_soon()
                case wire.Upward():
                    relay.num_unread, relay.owes_taken = len(frame.items), True
                    for item in frame.items:
                        self._arrived.put_nowait((relay, self._arrival(number, item)))
                    if not frame.items:
                        self._flush_soon()
        return ""

    def _arrival(self, number: int, item: Item) -> Arrival:
        match item:
            case PacketBundle():
                return Arrival("", item)
            case NodeSaid():
                return Arrival(item.node, item.message)
            case NodeConnected():
                former = self._relay_of(item.node)
                if former is not None and self._routes[item.node] != number:
                    former.refused.append((item.node, "its agent has connected again"))
                self._routes[item.node] = number
                return Arrival(item.node, Connected())
            case _:
                assert_never(item)

    def _lose(self, number: int) -> None:
        self._relays[number] = None
        nodes = tuple(node for node, at in self._routes.items() if at == number)
        for node in nodes:
            del self._routes[node]
        self._arrived.put_nowait((None, Arrival("", RelayLost(nodes))))

    async def _watch(self) -> None:
        """Kills relays that were silent for `SILENT_S`. Pauses of the controller itself do not count."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            gap_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            for relay in self._of_those_that_run():
                if gap_s > 2 * LOOK_S:
                    relay.heard_s += gap_s
                elif looked_s > relay.heard_s + SILENT_S:
                    relay.process.kill()

    def _of_those_that_run(self) -> Iterable[_Relay]:
        return [relay for relay in self._relays if relay is not None and relay.is_ready]
