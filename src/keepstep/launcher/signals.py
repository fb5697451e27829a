"""The signals that end a keepstep program in an orderly way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator

from keepstep.programs import END_AT_ONCE, signal_name, unless_ignored
from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery import EXIT_DRAINED, EXIT_FAILED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torchrun handles. SIGQUIT acts like SIGINT here, and the program leaves no core file."""
StopSignal = asyncio.Future[int]


@dataclasses.dataclass(frozen=True, slots=True)
class EndSignals:
    """The signals that a program which can drain has received. Each future holds the number of a signal."""

    drain: StopSignal
    """Set by the first SIGTERM, if no other signal came before: the program must drain."""
    stop: StopSignal
    """Set by SIGINT, SIGHUP, SIGQUIT, a second SIGTERM, or the parent's `END_AT_ONCE`: it must end at once."""

    def ended(self) -> EndJob | None:
        """Returns how the received signals end the program; None if there is none."""
        came = [each.result() for each in (self.stop, self.drain) if each.done()]
        return ended_by(came[0]) if came else None


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Yields a future for the first signal. Call it inside a running event loop."""
    stopped: StopSignal = asyncio.get_running_loop().create_future()
    with _handled(lambda number: _set(stopped, number)):
        yield stopped


@contextlib.contextmanager
def end_signals() -> Iterator[EndSignals]:
    """Like `stop_signal`, for a program that drains at the first SIGTERM."""
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
    numbers = [*unless_ignored(*_SIGNALS), END_AT_ONCE]
    for number in numbers:
        loop.add_signal_handler(number, came, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _set(future: StopSignal, number: int) -> None:
    if not future.done():
        future.set_result(number)


def ended_by(number: int) -> EndJob:
    """Returns how a job ends after a signal: on SIGTERM as with torchrun, else with the exit code of a shell."""
    if number == END_AT_ONCE:
        return EndJob(EXIT_FAILED, "ended by the process that started it")
    code = EXIT_DRAINED if number == signal.SIGTERM else 128 + number
    return EndJob(code, f"ended by {signal_name(number)}")
