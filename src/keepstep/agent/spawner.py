"""The agent's end of its spawner process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from keepstep.errors import PeerLost
from keepstep.transports.spawning import (
    MAX_PACKET_BYTES,
    SpawnerReady,
    SpawnerReport,
    SpawnWorker,
    WorkerSpawned,
    decode_report,
    send_request,
)

START_DEADLINE_S = 300.0
"""Importing torch takes seconds, on a cold network file system minutes."""
END_DEADLINE_S = 5.0
"""A spawner kills its workers when its socket has ended, and goes."""
_MODULE = "keepstep.worker.process.spawner"


@dataclasses.dataclass(frozen=True, slots=True)
class SpawnerSettings:
    """What a spawner is started with."""

    fork: bool
    """Make workers by forking a process that has imported torch."""
    environment: dict[str, str]
    """All variables that the spawner sees; a worker sees those of its request as well."""
    working_dir: Path | None = None
    """Of the spawner and its workers, None for that of this process."""
    preload: tuple[str, ...] = ()
    """Modules that it imports besides torch, where it forks."""


class SpawnerProcess:
    """A spawner that was started, with this end of the socket to it. It ends when this process does."""

    def __init__(self, settings: SpawnerSettings) -> None:
        """Starts the process, and does not wait for it."""
        self.settings = settings
        self.endpoint, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.endpoint.setblocking(False)
        command = [sys.executable, "-m", _MODULE, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        preload = ["--fork", *(f"--preload={module}" for module in settings.preload)] if settings.fork else []
        with theirs:
            self._process = subprocess.Popen(
                [*command, *preload],
                pass_fds=[theirs.fileno()],
                env=settings.environment,
                cwd=settings.working_dir,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> None:
        """Ends it, with every worker that is left, and waits until it is gone. Any number of times."""
        self.endpoint.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once; for one that has no workers yet."""
        self.endpoint.close()
        self._process.kill()
        self._process.wait()


class SpawnerClient:
    """Starts the spawner, passes requests to it, and hands its reports to ``on_report``."""

    def __init__(self, on_report: Callable[[SpawnerReport], None], on_lost: Callable[[], None]) -> None:
        self._on_report = on_report
        self._on_lost = on_lost
        self._process: SpawnerProcess | None = None
        self._endpoint: socket.socket | None = None
        self._ready: asyncio.Future[SpawnerReady] | None = None
        self._unsent: deque[tuple[SpawnWorker, list[int]]] = deque()
        self._answered = True

    async def start(self, settings: SpawnerSettings, begun: SpawnerProcess | None = None) -> SpawnerReady:
        """Starts the process and waits until it can make workers.

        Args:
            settings: of the spawner.
            begun: one that was started already. It is taken if its settings are these, and ended if not.

        Raises:
            PeerLost: it ended, or was not ready in time.
        """
        loop = asyncio.get_running_loop()
        if begun is not None and begun.settings != settings:
            begun.kill()
            begun = None
        self._process = begun or SpawnerProcess(settings)
        self._endpoint = self._process.endpoint
        self._ready = loop.create_future()
        loop.add_reader(self._endpoint.fileno(), self._readable)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                return await self._ready
        except TimeoutError:
            raise PeerLost(f"the process that starts workers was not ready within {START_DEADLINE_S:g} s") from None

    def spawn(self, request: SpawnWorker, descriptors: list[int]) -> None:
        """Asks for a worker; the report comes later. The caller closes its descriptors."""
        self._unsent.append((request, [os.dup(descriptor) for descriptor in descriptors]))
        self._send_next()

    def _send_next(self) -> None:
        """One request at a time: the spawner takes no more, and what waits in a socket is bounded."""
        if self._unsent and self._answered and self._endpoint is not None:
            request, descriptors = self._unsent.popleft()
            with contextlib.suppress(ConnectionError):  # the spawner is dead, as the end of its reports will tell
                send_request(self._endpoint, request, descriptors)
            self._answered = False
            for descriptor in descriptors:
                os.close(descriptor)

    async def stop(self) -> None:
        """Ends the spawner, which kills every worker that is left, and waits for it."""
        if self._endpoint is not None:
            asyncio.get_running_loop().remove_reader(self._endpoint.fileno())
            self._endpoint.close()
            self._endpoint = None
        for descriptor in (number for _, descriptors in self._unsent for number in descriptors):
            os.close(descriptor)
        self._unsent.clear()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, even before its last reports have been read.

        The kernel closes the sockets of a process before it signals its children that their parent has died.
        """
        if self._endpoint is None:
            return True
        poll = select.poll()
        poll.register(self._endpoint, 0)
        return any(events & select.POLLHUP for _descriptor, events in poll.poll(0))

    def _readable(self) -> None:
        assert self._endpoint is not None
        assert self._ready is not None
        try:
            data = self._endpoint.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._endpoint.fileno())
            if not self._ready.done():
                self._ready.set_exception(PeerLost("the process that starts workers ended before it was ready"))
            self._on_lost()
            return
        report = decode_report(data)
        if isinstance(report, SpawnerReady) and not self._ready.done():
            self._ready.set_result(report)
        self._on_report(report)
        if isinstance(report, WorkerSpawned):
            self._answered = True
            self._send_next()
