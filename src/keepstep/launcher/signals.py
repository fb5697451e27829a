"""The signals that end a program of keepstep's in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from keepstep.protocol.messages import EndJob

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
StopSignal = asyncio.Future[int]


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """A future that holds the first such signal, as soon as one has come. Inside a running loop."""
    loop = asyncio.get_running_loop()
    stopped: StopSignal = loop.create_future()

    def came(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, came, number)
    try:
        yield stopped
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def ended_by(number: int) -> EndJob:
    """How a job ends that such a signal has ended, with the exit code that a shell gives it."""
    return EndJob(128 + number, f"ended by {signal.Signals(number).name}")
