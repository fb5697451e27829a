"""The signals that end a program of keepstep's in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator

from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery import EXIT_DRAINED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun handles. SIGQUIT ends a program as SIGINT does, and leaves no core file."""
StopSignal = asyncio.Future[int]


@dataclasses.dataclass(frozen=True, slots=True)
class EndSignals:
    """What a program that can end gently is told by signals; each future holds the number of a signal."""

    drain: StopSignal
    """The first SIGTERM, if nothing has told it to stop before."""
    stop: StopSignal
    """SIGINT, SIGHUP, SIGQUIT, or a second SIGTERM: it must end at once."""

    def ended(self) -> EndJob | None:
        """How the program ends by what has come so far; None where nothing has."""
        came = [each.result() for each in (self.stop, self.drain) if each.done()]
        return ended_by(came[0]) if came else None


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """A future that holds the first such signal, as soon as one has come. Inside a running loop."""
    stopped: StopSignal = asyncio.get_running_loop().create_future()
    with _handled(lambda number: _set(stopped, number)):
        yield stopped


@contextlib.contextmanager
def end_signals() -> Iterator[EndSignals]:
    """The same for a program that a first SIGTERM drains."""
    loop = asyncio.get_running_loop()
    signals = EndSignals(loop.create_future(), loop.create_future())

    def came(number: int) -> None:
        is_first = number == signal.SIGTERM and not signals.drain.done() and not signals.stop.done()
        _set(signals.drain if is_first else signals.stop, number)

    with _handled(came):
        yield signals


@contextlib.contextmanager
def _handled(came: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, came, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _set(future: StopSignal, number: int) -> None:
    if not future.done():
        future.set_result(number)


def ended_by(number: int) -> EndJob:
    """How a job ends that such a signal has ended: as torchrun on SIGTERM, else with the code that a shell gives it."""
    code = EXIT_DRAINED if number == signal.SIGTERM else 128 + number
    return EndJob(code, f"ended by {signal.Signals(number).name}")
