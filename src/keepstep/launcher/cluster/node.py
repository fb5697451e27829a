"""One node's part of a job on several nodes: its agent and, on the node that owns the endpoint, the controller."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import socket
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from keepstep import eventloop
from keepstep.agent.agent import Agent
from keepstep.agent.settings import AgentSettings
from keepstep.errors import ConfigurationError
from keepstep.launcher.cluster.hosting import HostedController
from keepstep.launcher.cluster.weights import HostedWeights
from keepstep.launcher.signals import EndSignals, end_signals, ended_by
from keepstep.protocol.messages import EndJob, printable
from keepstep.protocol.node.agent import DELIVER_S
from keepstep.protocol.recovery import EXIT_FAILED
from keepstep.transports.rpc.client import RpcControllerConnection
from keepstep.trust.credentials import Credentials

_T = TypeVar("_T")

DEPART_S = 2 * DELIVER_S
"""How long a node that leaves delivers its last reports, and waits for the controller's acknowledgement. Without one,
its lease expires later."""
HEAD_START_S, HEAD_START_SHARE = 1.0, 0.25
"""A scheduler that ends a job signals all of its nodes, not quite at once. So a node that does not host the controller
waits before it has its ranks moved, perhaps to nodes that leave as well: the controller may be about to drain the job.
The second is the greatest share of the grace period that this may take."""
LAST_WORDS_S = 10.0
"""How long, at the end of the job, this node waits for each acknowledgement and for the controller's exit."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeOptions:
    """A node's part as the command line describes it."""

    agent: AgentSettings
    endpoints: tuple[str, ...]
    """HOST:PORT of the controller and of its standbys."""
    credentials: Credentials
    host_name: str | None
    """The name in the controller's certificate; None: its address."""
    patience_s: float
    """How long the node waits for a controller that it cannot reach."""
    grace_s: float
    """Time after SIGTERM at which the node leaves the job even if its ranks have not moved to other nodes."""
    weights: HostedWeights | None = None
    """The server that connects this node's publishers to those of other nodes."""


def run_node(options: NodeOptions, hosted: HostedController | None = None) -> EndJob:
    """Serves a job on this node until it has ended.

    A signal that drains, on the node that hosts the controller, drains the job. On any other node it drains that node:
    its ranks continue until spares of other nodes take them. What each signal does: `keepstep.programs.DISPOSITIONS`.

    Raises:
        ConfigurationError: the controller refuses this node or does not start, or another process of this machine
            serves the node.
        PeerLost: the node could not reach a controller for too long.
    """
    with _only_one(options):
        return eventloop.run(_run(options, hosted))


@contextlib.contextmanager
def _only_one(options: NodeOptions) -> Iterator[None]:
    """Ensures that no other process of this machine serves the node, by binding an abstract Unix socket.

    The controller would take a second agent of a node for a restart of the first one, and would end the first one.
    Processes without the token cannot guess the socket's name.
    """
    seal = hashlib.sha256(" ".join((*options.endpoints, options.credentials.token)).encode()).hexdigest()
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(f"\0keepstep-node-{seal}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigurationError(
                f"node {options.agent.place.node!r} of the job at {options.endpoints[0]} is served by another process "
                "of this machine: give each its own --node-rank or --node-name"
            ) from None
        yield


async def _run(options: NodeOptions, hosted: HostedController | None) -> EndJob:
    connection = RpcControllerConnection(options.endpoints, options.credentials, options.host_name, options.patience_s)
    agent = Agent(options.agent, connection)
    connection.on_trouble = lambda trouble: (
        _tell_trouble(trouble, was_connected=connection.has_opened) if agent.left is None else None
    )
    part = _Part(agent, connection, hosted, options)
    with end_signals(drain_on=options.agent.drain_on, pass_on=agent.pass_signal) as signals:
        try:
            return await part.run(signals)
        finally:
            await part.end()


class _Part:
    """The parts that run on this node: the agent, its connection to the controller, and perhaps the controller."""

    def __init__(
        self, agent: Agent, connection: RpcControllerConnection, hosted: HostedController | None, options: NodeOptions
    ) -> None:
        self._agent = agent
        self._connection = connection
        self._hosted = hosted
        self._weights = options.weights
        self._grace_s = options.grace_s
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self, signals: EndSignals) -> EndJob:
        """Runs until the job has ended, this node's part of it has, or a signal has ended it."""
        hosting = self._begin(self._hosted.run()) if self._hosted is not None else None
        if self._weights is not None:
            self._begin(self._weights.run())
        starting = self._begin(self._agent.start())
        await _first_of(starting, signals.stop, signals.drain)
        if not starting.done() and (end := signals.ended()) is not None:
            return end
        starting.result()
        connecting = self._begin(self._connection.run())
        serving = self._begin(self._agent.run())
        await _first_of(connecting, serving, signals.stop, signals.drain, hosting)
        if signals.drain.done() and not (connecting.done() or serving.done() or signals.stop.done()):
            await self._drain(connecting, serving, signals, hosting)
        if connecting.done():
            connecting.result()  # raises: the controller has refused this node, or was unreachable
        if hosting is not None and hosting.done():
            hosting.result()  # raises: it did not start
        if serving.done() and self._agent.left is None and hosting is not None and not hosting.done():
            serving.result()
            print("keepstep: the workers of this node are lost; its controller goes on", file=sys.stderr, flush=True)
            await _first_of(hosting, signals.stop)
        if signals.stop.done() and self._hosted is not None:
            await self._hosted.end(signals.stop.result())
        elif signals.stop.done() and not serving.done():
            self._agent.depart(ended_by(signals.stop.result()).reason)
            await asyncio.wait({serving}, timeout=DEPART_S)
        return await self._take_leave(connecting, serving, hosting, signals)

    async def _drain(
        self,
        connecting: asyncio.Task[None],
        serving: asyncio.Task[None],
        signals: EndSignals,
        hosting: asyncio.Task[int] | None,
    ) -> None:
        """Drains the job or this node. Returns when that is done, or after the grace period."""
        others = [each for each in (connecting, serving, signals.stop, hosting) if each is not None]
        reason = ended_by(signals.drain.result()).reason
        if self._hosted is not None:
            self._hosted.drain(signals.drain.result())
            await asyncio.wait(others, timeout=self._grace_s + LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
            return
        head_start_s = min(HEAD_START_S, HEAD_START_SHARE * self._grace_s)
        await asyncio.wait(others, timeout=head_start_s, return_when=asyncio.FIRST_COMPLETED)
        if not any(each.done() for each in others):
            self._agent.drain(reason)
            await asyncio.wait(others, timeout=self._grace_s - head_start_s, return_when=asyncio.FIRST_COMPLETED)
        if not any(each.done() for each in others):
            self._agent.depart(reason)
            await asyncio.wait({serving}, timeout=DEPART_S)

    async def _take_leave(
        self,
        connecting: asyncio.Task[None],
        serving: asyncio.Task[None],
        hosting: asyncio.Task[int] | None,
        signals: EndSignals,
    ) -> EndJob:
        """Waits for the agent, the connection and the controller to end in this order. Returns how the job ended."""
        if self._hosted is not None:
            await asyncio.wait({serving}, timeout=LAST_WORDS_S)
        if serving.done():
            serving.result()
            self._connection.close()
            await asyncio.wait({connecting}, timeout=LAST_WORDS_S)
        if hosting is not None:
            await asyncio.wait({hosting}, timeout=LAST_WORDS_S)
        if signals.stop.done() and self._hosted is None:
            return ended_by(signals.stop.result())
        if self._agent.left is not None:
            return EndJob(self._agent.left.exit_code, self._agent.left.reason)
        if hosting is not None and hosting.done():
            return EndJob(hosting.result() or EXIT_FAILED, "the job ended, and this node's agent was not informed")
        return signals.ended() or self._agent.deserted() or EndJob(EXIT_FAILED, "the agent ended before the job did")

    async def end(self) -> None:
        """Stops everything that still runs."""
        await self._agent.stop()
        if self._hosted is not None:
            await self._hosted.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._weights is not None:
            await self._weights.end()

    def _begin(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(coroutine)
        self._tasks.append(task)
        return task


async def _first_of(*awaited: asyncio.Future[Any] | None) -> None:
    await asyncio.wait({each for each in awaited if each is not None}, return_when=asyncio.FIRST_COMPLETED)


def _tell_trouble(trouble: str, *, was_connected: bool) -> None:
    where = "the controller, training continues" if was_connected else "a controller yet"
    print(f"keepstep: no connection to {where}: {printable(trouble)}", file=sys.stderr, flush=True)
