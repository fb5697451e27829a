"""The signals that end a keepstep program in an orderly way, and those that it passes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator

from keepstep.programs import DRAIN_ON, END_AT_ONCE, Disposition, Program, dispositions, signal_name
from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery import EXIT_DRAINED, EXIT_FAILED

StopSignal = asyncio.Future[int]
PassOn = Callable[[int], int]
"""Sends a signal to the ranks that handle it, and returns to how many."""
DRAIN, END = "drain", "end"
"""What a parent writes to the standard input of its child: one of them, and the number of the signal, on a line."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndSignals:
    """The signals that a program which can drain has received. Each future holds the number of a signal."""

    drain: StopSignal
    """Set by the first signal that drains, if no other signal came before."""
    stop: StopSignal
    """Set by a signal that ends the program at once, by a second one, or by its parent."""

    def ended(self) -> EndJob | None:
        """Returns how the received signals end the program; None if there is none."""
        if self.stop.done():
            return ended_by(self.stop.result())
        return EndJob(EXIT_DRAINED, ended_by(self.drain.result()).reason) if self.drain.done() else None


@contextlib.contextmanager
def stop_signal(*, is_child: bool = False) -> Iterator[StopSignal]:
    """Yields a future for the first signal that ends this program. Call it inside a running event loop.

    Args:
        is_child: whether its parent tells it, and it ignores signals.
    """
    with end_signals(Program.CHILD if is_child else Program.VIEW) as signals:
        yield signals.stop


@contextlib.contextmanager
def end_signals(
    program: Program = Program.LAUNCHER, drain_on: Collection[int] = (), pass_on: PassOn | None = None
) -> Iterator[EndSignals]:
    """Like `stop_signal`, for a program that can drain.

    Args:
        program: which it is.
        drain_on: signals that drain it besides those of `keepstep.programs.DISPOSITIONS`.
        pass_on: passes on the signals that are the ranks'.
    """
    loop = asyncio.get_running_loop()
    signals = EndSignals(loop.create_future(), loop.create_future())

    def drains(number: int) -> None:
        is_first = not signals.drain.done() and not signals.stop.done()
        _set(signals.drain if is_first else signals.stop, number)

    def ends(number: int) -> None:
        _set(signals.stop, number)

    def others(number: int) -> None:
        if pass_on is None or not pass_on(number):
            name = signal_name(number)
            hint = f"; --drain-on {name} has it drain the job" if name in DRAIN_ON else ""
            print(f"keepstep: {name} is ignored, for no rank handles it{hint}", file=sys.stderr, flush=True)

    handlers = {
        Disposition.DRAIN: drains,
        Disposition.END: ends,
        Disposition.FORWARD: others,
        Disposition.IGNORE: others,
    }
    found = {number: handlers[disposition] for number, disposition in dispositions(program).items()}
    found |= dict.fromkeys(drain_on, drains)
    with contextlib.ExitStack() as stack:
        if program is Program.CHILD:
            found = {}
            stack.enter_context(_told_by_parent({DRAIN: drains, END: ends}))
        found[END_AT_ONCE] = ends
        for number, handler in found.items():
            loop.add_signal_handler(number, handler, number)
            stack.callback(loop.remove_signal_handler, number)
        yield signals


@contextlib.contextmanager
def _told_by_parent(act: dict[str, Callable[[int], None]]) -> Iterator[None]:
    """Reads what the parent writes to the standard input. When the parent dies, the kernel sends `END_AT_ONCE`."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()
    unread = b""

    def read() -> None:
        nonlocal unread
        if not (data := os.read(stdin, 4096)):
            loop.remove_reader(stdin)
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            what, _, number = line.decode().partition(" ")
            act[what](int(number))

    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)


def _set(future: StopSignal, number: int) -> None:
    if not future.done():
        future.set_result(number)


def ended_by(number: int) -> EndJob:
    """Returns how a job ends at once after a signal: with torchrun's exit code for SIGTERM, else with a shell's."""
    if number == END_AT_ONCE:
        return EndJob(EXIT_FAILED, "ended by the process that started it")
    code = EXIT_DRAINED if number == signal.SIGTERM else 128 + number
    return EndJob(code, f"ended by {signal_name(number)}")
