"""A real spawner with real workers, for tests that are not asynchronous themselves."""

import asyncio
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.agent.spawner import SpawnerClient, SpawnerSettings
from keepstep.shared import lifeline, snapshotfile, tagpage
from keepstep.transports.spawning import SpawnerReady, SpawnerReport, SpawnWorker, WorkerExited, WorkerSpawned

DEADLINE_S = 60.0
"""Ends a test that hangs; no measure of anything."""


@dataclass
class Worker:
    """One worker of a test: its two streams, its link, and the futures of its reports."""

    number: int
    folder: Path
    link: socket.socket
    spawned: Future[WorkerSpawned] = field(default_factory=Future)
    exited: Future[WorkerExited] = field(default_factory=Future)

    @property
    def pid(self) -> int:
        return self.spawned.result(DEADLINE_S).pid

    @property
    def status(self) -> int:
        return self.exited.result(DEADLINE_S).status

    @property
    def stdout(self) -> str:
        """All that it wrote; only when it has ended."""
        _ = self.status
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        _ = self.status
        return (self.folder / "stderr").read_text()


class Crew:
    """A spawner client on a loop of its own thread, which lives as long as the crew (a worker dies with its parent)."""

    def __init__(self, fork: bool, working_dir: Path | None = None, **settings: Any) -> None:
        self.fork = fork
        self.lost: Future[None] = Future()
        self.workers: dict[int, Worker] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client = SpawnerClient(self._on_report, lambda: self.lost.set_result(None))
        environment = dict(os.environ) | {"FROM_THE_LAUNCHER": "here", "PYTHONUNBUFFERED": ""}
        wanted = SpawnerSettings(fork, environment, working_dir, **settings)
        self.ready: SpawnerReady = self._run(self.client.start(wanted))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def _on_report(self, report: SpawnerReport) -> None:
        match report:
            case WorkerSpawned():
                self.workers[report.worker].spawned.set_result(report)
            case WorkerExited():
                self.workers[report.worker].exited.set_result(report)

    def spawn(
        self, *command: str, module: bool = False, raw: bool = False, stdout: int | None = None, **environment: str
    ) -> Worker:
        """Starts a worker whose output goes to files, or to the descriptor ``stdout``."""
        number = len(self.workers)
        folder = Path(self._folder.name) / str(number)
        folder.mkdir()
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_S)
        worker = self.workers[number] = Worker(number, folder, ours)
        page = tagpage.create(f"test-{number}")
        line = lifeline.create(f"test-{number}")
        memory = snapshotfile.create(f"test-{number}")
        files = [os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("stdout", "stderr")]
        request = SpawnWorker(number, command, module, raw, environment, True, True)
        streams = [files[0] if stdout is None else stdout, files[1]]
        self._run(self._send(request, [theirs.fileno(), page, line, memory, *streams]))
        for descriptor in (page, line, memory, *files):
            os.close(descriptor)
        theirs.close()
        return worker

    async def _send(self, request: SpawnWorker, descriptors: list[int]) -> None:
        self.client.spawn(request, descriptors)

    @property
    def spawner_pid(self) -> int:
        assert self.client._process is not None
        return self.client._process.pid

    def stop(self) -> None:
        """Ends the spawner and everything it started."""
        self._run(self.client.stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for worker in self.workers.values():
            worker.link.close()
        self._folder.cleanup()


PYTHON = sys.executable
