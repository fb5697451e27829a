"""The dashboard's process. It reads one line of settings from standard input, and exits when standard input ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn

from keepstep import eventloop
from keepstep.dashboard.app import Dashboard
from keepstep.dashboard.settings import ServerSettings
from keepstep.errors import KeepstepError
from keepstep.programs import begin, leave_signals_to_parent
from keepstep.systemcalls import needed

NICENESS = 19
"""Training has priority: on a machine without idle time, the dashboard gets about a hundredth of a core."""
MAX_CONNECTIONS = 1000
LAST_SEND_S = 0.5
"""Time to send the end of the job to open pages before the process exits."""


class _Server(uvicorn.Server):
    """A server that leaves the signals to this program: uvicorn would handle those that are ignored, too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Changes nothing."""
        yield


async def _serve(settings: ServerSettings) -> None:
    dashboard = Dashboard(Path(settings.folder))
    listening = socket.socket(fileno=settings.descriptor)
    config = uvicorn.Config(
        dashboard.app(settings.token, settings.cookie),
        access_log=False,
        log_level="critical",  # malformed requests of strangers must not fill the job's output
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()

    def told() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            ending.set()

    loop.add_reader(sys.stdin.fileno(), told)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    waiting = asyncio.create_task(ending.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(sys.stdin.fileno())
    dashboard.live.poll()
    await asyncio.sleep(LAST_SEND_S if dashboard.live.num_pages else 0)
    server.should_exit = True
    await serving


def main() -> None:
    """Runs until standard input ends."""
    begin()
    leave_signals_to_parent()
    with contextlib.suppress(OSError):  # a container may forbid either; then what is allowed remains
        os.nice(NICENESS)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it never preempts the job
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerSettings)
    try:
        with needed():
            eventloop.run(_serve(settings))
    except KeepstepError as error:
        print(f"keepstep dashboard: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
