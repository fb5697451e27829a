"""A controller's connections over a real network stack, and an agent's connection to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

from keepstep.transports.rpc.client import RpcControllerConnection
from keepstep.transports.rpc.server import RpcNodeConnections
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret, check

DEADLINE_S = 20.0


@dataclasses.dataclass
class Served:
    """A controller's end, and what it takes to reach it."""

    connections: RpcNodeConnections
    port: int
    secret: Secret
    is_tls: bool
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Addresses, and why they were sent away."""
    was_refused: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def credentials(self, node: str, secret: Secret | None = None) -> Credentials:
        """Of a node's agent, in this job unless another secret is given."""
        found = Credentials.of(self.secret, Claim(Role.AGENT, node))
        if secret is not None:
            found = dataclasses.replace(found, token=Credentials.of(secret, Claim(Role.AGENT, node)).token)
        return found if self.is_tls else dataclasses.replace(found, authority=None)

    def line(
        self, credentials: Credentials, patience_s: float = DEADLINE_S, ports: Sequence[int] = ()
    ) -> RpcControllerConnection:
        """An agent's line, to this controller or to those at some ports."""
        endpoints = [f"127.0.0.1:{port}" for port in ports or (self.port,)]
        return RpcControllerConnection(endpoints, credentials, patience_s=patience_s)

    async def next_refusal(self) -> tuple[str, str]:
        """The next address that is sent away, and why."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.refused:
                self.was_refused.clear()
                await self.was_refused.wait()
        return self.refused.pop(0)


@contextlib.asynccontextmanager
async def served(
    *, is_tls: bool = True, port: int = 0, secret: Secret | None = None, term: int = 0
) -> AsyncIterator[Served]:
    """A controller's end on the loopback interface."""
    secret = secret or Secret.new()

    def admit(token: str) -> str:
        return check(secret, token).name

    def on_refused(address: str, why: str) -> None:
        found.refused.append((address, why))
        found.was_refused.set()

    connections = RpcNodeConnections(admit, on_refused, term)
    found = Served(connections, 0, secret, is_tls)
    found.port = await connections.start("127.0.0.1", port, certificates.server(secret) if is_tls else None)
    try:
        yield found
    finally:
        await connections.stop()


@contextlib.asynccontextmanager
async def connected(line: RpcControllerConnection) -> AsyncIterator[asyncio.Task[None]]:
    """Keeps an agent's line up; yields the task that does."""
    running = asyncio.create_task(line.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait({running})
