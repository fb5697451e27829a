"""The agent's end of its spawner process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
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
_MODULE = "keepstep.worker.process.spawner"


class SpawnerClient:
    """Starts the spawner, passes requests to it, and hands its reports to ``on_report``."""

    def __init__(self, on_report: Callable[[SpawnerReport], None], on_lost: Callable[[], None]) -> None:
        self._on_report = on_report
        self._on_lost = on_lost
        self._endpoint: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[SpawnerReady] | None = None
        self._unsent: deque[tuple[SpawnWorker, list[int]]] = deque()
        self._answered = True

    async def start(
        self,
        fork: bool,
        environment: dict[str, str],
        working_dir: Path | None = None,
        preload: tuple[str, ...] = (),
    ) -> SpawnerReady:
        """Starts the process and waits until it can make workers.

        Args:
            fork: make workers by forking a process that has imported torch.
            environment: all variables that the spawner and its workers see.
            preload: modules that it imports besides torch, where it forks.
            working_dir: of the spawner and its workers, None for that of this process.

        Raises:
            PeerLost: it ended, or was not ready in time.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", _MODULE, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - exec alone does not block; reports come by the socket
                [*command, "--fork", *(f"--preload={module}" for module in preload)] if fork else command,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=working_dir,
            )
        self._endpoint = ours
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)
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
            try:
                await asyncio.to_thread(self._process.wait, 5.0)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(self._process.wait)

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
