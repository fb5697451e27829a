"""A controller's connections that relays hold: real processes, real agents' connections, and relays that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from keepstep.errors import ConfigurationError
from keepstep.protocol import messages as msg
from keepstep.protocol.relay.bundle import PacketBundle
from keepstep.protocol.transfer.directory import PublishingNode
from keepstep.transports.interface import Arrival, Connected, RelayLost
from keepstep.transports.relay import connections
from keepstep.transports.relay.connections import RelayedNodeConnections
from keepstep.transports.rpc.client import RpcControllerConnection
from keepstep.transports.rpc.directory import DirectoryCaller
from keepstep.trust import certificates
from keepstep.trust.credentials import Credentials
from keepstep.trust.tokens import Claim, Role, Secret

DEADLINE_S = 60.0
NODES = [f"node-{number}" for number in range(6)]


class Job:
    """A controller's end with its relays, and one agent's connection for each node."""

    def __init__(self, num_relays: int) -> None:
        self.secret = Secret.new()
        self.refused: list[tuple[str, str]] = []
        self.connections = RelayedNodeConnections(
            num_relays, self.secret, lambda address, why: self.refused.append((address, why))
        )
        self.agents: dict[str, RpcControllerConnection] = {}
        self.arrived: list[Arrival] = []
        self._running: list[asyncio.Task[None]] = []
        self.port = 0

    def connect(self, node: str) -> RpcControllerConnection:
        credentials = Credentials.of(self.secret, Claim(Role.AGENT, node))
        agent = self.agents[node] = RpcControllerConnection([f"127.0.0.1:{self.port}"], credentials)
        self._running.append(asyncio.create_task(agent.run()))
        return agent

    def relay_pids(self) -> list[int]:
        """The processes of the relays that run."""
        return [relay.process.pid for relay in self.connections._relays if relay is not None]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Takes what arrives until something is so."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.arrived.append(await self.connections.receive())

    async def agents_know(self) -> None:
        """Returns when each agent knows of its next connection: what it says before that is lost."""
        async with asyncio.timeout(DEADLINE_S):
            for agent in self.agents.values():
                assert await agent.receive() == Connected()

    def connected(self) -> list[str]:
        return [each.node for each in self.arrived if isinstance(each.message, Connected)]

    def heard(self) -> set[str]:
        """The nodes of which a packet has come, alone or in a bundle."""
        found: set[str] = set()
        for each in self.arrived:
            if isinstance(each.message, PacketBundle):
                found |= set(each.message.nodes)
            elif isinstance(each.message, msg.Packet):
                found.add(each.node)
        return found

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.connections.stop()


@contextlib.asynccontextmanager
async def job(num_relays: int = 2) -> AsyncIterator[Job]:
    found = Job(num_relays)
    found.port = await found.connections.start("127.0.0.1", 0, certificates.server(found.secret))
    try:
        for node in NODES:
            found.connect(node)
        await found.until(lambda: set(found.connected()) == set(NODES))
        await found.agents_know()
        yield found
    finally:
        await found.close()


def beat(node: str) -> msg.Packet:
    return msg.Packet(node, 1, 1, 1, (), misses=False)


async def heard_by(agent: RpcControllerConnection) -> object:
    async with asyncio.timeout(DEADLINE_S):
        while isinstance(message := await agent.receive(), Connected):
            pass
        return message


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay of a busy machine is not taken for one that hangs."""
    monkeypatch.setattr(connections, "SILENT_S", DEADLINE_S)


@pytest.mark.usefixtures("patient")
def test_what_agents_and_controller_say_arrives() -> None:
    async def talk() -> None:
        async with job() as served:
            for node, agent in served.agents.items():
                agent.send(beat(node))
            await served.until(lambda: served.heard() == set(NODES))
            assert set(served.connections.routes) == set(NODES)
            served.connections.send("node-3", msg.Packet("node-3", 1, 5, 5, (), misses=True))
            assert await heard_by(served.agents["node-3"]) == msg.Packet("node-3", 1, 5, 5, (), misses=True)
            stop = (msg.Stop(2, "rank 1 lost", None),)
            by_relay: dict[int, list[tuple[str, int, int, int, tuple[int, ...]]]] = {}
            for node, relay in served.connections.routes.items():
                by_relay.setdefault(relay, []).append((node, 1, 5, 1, ()))
            bundles = [(relay, PacketBundle.of(rows, stop)) for relay, rows in by_relay.items()]
            served.connections.send_bundles(bundles)
            for node, agent in served.agents.items():
                assert await heard_by(agent) == msg.Packet(node, 1, 5, 1, stop, misses=False)

    asyncio.run(talk())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_agents_of_a_relay_that_is_lost_connect_again_and_it_comes_back(number: signal.Signals) -> None:
    async def lose() -> None:
        async with job(num_relays=1) as served:
            (pid,) = served.relay_pids()
            served.arrived.clear()
            os.kill(pid, number)
            await served.until(lambda: any(isinstance(each.message, RelayLost) for each in served.arrived))
            (lost,) = [each.message for each in served.arrived if isinstance(each.message, RelayLost)]
            assert set(lost.nodes) == set(NODES)
            await served.until(lambda: set(served.connected()) == set(NODES))
            assert served.relay_pids() not in ([], [pid])
            await served.agents_know()
            for node, agent in served.agents.items():
                agent.send(beat(node))
            await served.until(lambda: served.heard() == set(NODES))

    asyncio.run(lose())


@pytest.mark.usefixtures("patient")
def test_a_node_that_reports_for_another_is_cut_off_and_no_other_one() -> None:
    async def lie() -> None:
        async with job() as served:
            served.agents["node-0"].send(beat("node-1"))
            await served.until(lambda: served.connected().count("node-0") == 2)
            assert [why for _, why in served.refused] == ["node node-0: node node-0 spoke for node node-1"]
            assert sorted(served.connected()) == sorted([*NODES, "node-0"])

    asyncio.run(lie())


@pytest.mark.usefixtures("patient")
def test_an_agent_that_is_refused_by_the_controller_is_cut_off() -> None:
    async def refuse() -> None:
        async with job() as served:
            served.connections.refuse("node-2", "it acknowledges what was not said")
            await served.until(lambda: served.connected().count("node-2") == 2)
            assert [why for _, why in served.refused] == ["node node-2: it acknowledges what was not said"]

    asyncio.run(refuse())


def test_another_controller_cannot_share_the_port() -> None:
    async def share() -> None:
        async with job() as served:
            other = RelayedNodeConnections(1, Secret.new(), lambda address, why: None)
            with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{served.port}"):
                await other.start("127.0.0.1", served.port, None)

    asyncio.run(share())


def test_the_relays_end_with_the_connections() -> None:
    async def end() -> list[int]:
        async with job() as served:
            return served.relay_pids()

    for pid in asyncio.run(end()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.usefixtures("patient")
def test_a_relay_that_cannot_be_started_again_ends_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its launcher, or its supervisor, starts again. Without a relay no agent could connect any more."""

    async def test() -> None:
        async with job(1) as served:
            (relay,) = served.relay_pids()

            def fail(*_arguments: object, **_settings: object) -> None:
                raise OSError(errno.EAGAIN, "no process is left")

            monkeypatch.setattr(connections.subprocess, "Popen", fail)
            os.kill(relay, signal.SIGKILL)
            with pytest.raises(OSError, match="no process is left"):
                await served.until(lambda: False)

    asyncio.run(test())


def test_every_relay_knows_where_weights_are_published_whichever_was_told() -> None:
    """The kernel chooses the relay of each connection: hardly ever the same one for all of these."""

    def caller(made: Job, role: Role, name: str) -> DirectoryCaller:
        return DirectoryCaller([f"127.0.0.1:{made.port}"], Credentials.of(made.secret, Claim(role, name)))

    def find_all(made: Job) -> None:
        with contextlib.ExitStack() as stack:
            publishers = [caller(made, Role.PUBLISHER, name) for name in NODES]
            receivers = [caller(made, Role.RECEIVER, f"e{number}") for number in range(6)]
            for each in (*publishers, *receivers):
                stack.callback(each.close)
            for name, publisher in zip(NODES, publishers, strict=True):
                publisher.find(f"{name}:1")
            expected = tuple(PublishingNode(name, f"{name}:1") for name in NODES)
            until_s = time.monotonic() + DEADLINE_S
            for receiver in receivers:
                while (found := receiver.find(None)) != expected:
                    assert time.monotonic() < until_s, found
                    threading.Event().wait(0.02)

    async def test() -> None:
        async with job() as made:
            await asyncio.to_thread(find_all, made)

    asyncio.run(test())
