"""Starts the spawner process and talks to it, on the agent's side."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

from keepstep.errors import PeerLost
from keepstep.programs import own_command
from keepstep.transports.spawning import (
    MAX_PACKET_BYTES,
    SpawnerFailed,
    SpawnerReady,
    SpawnerReport,
    SpawnWorker,
    WorkerRefused,
    WorkerSpawned,
    decode_report,
    send_request,
)

START_DEADLINE_S = 300.0
"""Importing torch takes seconds, on a cold network file system minutes."""
END_DEADLINE_S = 5.0
"""How long the spawner may take to kill its workers and exit after this process has closed the socket to it."""
_MODULE = "keepstep.worker.process.spawner"


@dataclasses.dataclass(frozen=True, slots=True)
class SpawnerSettings:
    """Settings of a spawner."""

    fork: bool
    """Whether it forks workers from a process that has imported torch."""
    environment: dict[str, str]
    """All environment variables of the spawner. A worker also gets those of its request."""
    working_dir: Path | None = None
    """Working directory of the spawner and its workers; None: that of this process."""
    preload: tuple[str, ...] = ()
    """Modules that it imports besides torch, if it forks."""
    preload_path: str | None = None
    """The folder in which it looks for them first: the one in which the script looks first."""


class SpawnerProcess:
    """A running spawner process and the socket to it. It ends when this process ends."""

    def __init__(self, settings: SpawnerSettings) -> None:
        """Starts the process without waiting for it."""
        self.settings = settings
        self.endpoint, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.endpoint.setblocking(False)
        command = own_command(_MODULE, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
        if settings.fork:
            command += ["--fork", *(f"--preload={module}" for module in settings.preload)]
            command += ["--preload-path", settings.preload_path] if settings.preload_path else []
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=settings.environment,
                cwd=settings.working_dir,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> None:
        """Ends the process and all its workers, and waits for its exit. Repeated calls do no harm."""
        self.endpoint.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the process at once. Only for a spawner without workers."""
        self.endpoint.close()
        self._process.kill()
        self._process.wait()


class SpawnerClient:
    """Starts the spawner, passes requests to it, and hands its reports to ``on_report``."""

    def __init__(self, on_report: Callable[[SpawnerReport], None], on_lost: Callable[[], None]) -> None:
        """Both are called on the event loop, and must not raise."""
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
            settings: settings of the spawner.
            begun: a spawner that is running already. It is used if its settings equal ``settings``, else killed.

        Raises:
            PeerLost: the process ended, or was not ready in time.
            CallRefused, LimitReached: the system refuses a call that it needs.
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
        """Requests a worker. The report follows later. The caller keeps and closes its descriptors."""
        self._unsent.append((request, [os.dup(descriptor) for descriptor in descriptors]))
        self._send_next()

    def _send_next(self) -> None:
        """Sends the next request if the last one was answered: the spawner handles one request at a time."""
        if self._unsent and self._answered and self._endpoint is not None:
            request, descriptors = self._unsent.popleft()
            with contextlib.suppress(ConnectionError):  # the spawner is dead; `_readable` reports that
                send_request(self._endpoint, request, descriptors)
            self._answered = False
            for descriptor in descriptors:
                os.close(descriptor)

    async def stop(self) -> None:
        """Ends the spawner, which kills all its workers, and waits for its exit."""
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
        """Whether the process is gone. True even if its last reports have not been read yet.

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
        if isinstance(report, SpawnerFailed) and not self._ready.done():
            self._ready.set_exception(report.error)
        self._on_report(report)
        if isinstance(report, WorkerSpawned | WorkerRefused):
            self._answered = True
            self._send_next()
