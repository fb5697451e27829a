"""The dashboard's process: one line of settings on its standard input, whose end is its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn

from keepstep.dashboard.app import Dashboard
from keepstep.dashboard.settings import ServerSettings

NICENESS = 19
"""Training comes first: on a machine without any idle time, what is left is a hundredth of a core."""
MAX_CONNECTIONS = 1000
LAST_SEND_S = 0.5
"""When the job has ended, pages are told so before the process ends."""


async def _serve(settings: ServerSettings) -> None:
    dashboard = Dashboard(Path(settings.folder))
    listening = socket.socket(fileno=settings.descriptor)
    config = uvicorn.Config(
        dashboard.app(settings.token, settings.cookie),
        access_log=False,
        log_level="critical",  # what a stranger sends is no news
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )
    server = uvicorn.Server(config)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the job, which is told by Ctrl-C itself
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a container may not allow it, and then there is still the niceness
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # it never preempts the job
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerSettings)
    asyncio.run(_serve(settings))


if __name__ == "__main__":
    main()
