"""``keepstep top``."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from keepstep.cli.arguments import add_run
from keepstep.cli.terminal.screen import Screen
from keepstep.programs import Program, dispositions
from keepstep.trace.timeline.run import Run

REFRESH_S = 0.2
WITHOUT_TERMINAL = (120, 60)
"""Columns and maximum lines of a frame that goes to a file or a pipe."""


def main(arguments: list[str]) -> int:
    """Shows a run in the terminal until its job has ended or the user presses ``q``."""
    parser = argparse.ArgumentParser(
        prog="keepstep top", description="Shows a run in the terminal, while it goes on: where every rank is, and why."
    )
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and end (so it is without a terminal)")
    chosen = parser.parse_args(arguments)
    console = Console(highlight=False)
    run = Run(chosen.run)
    with contextlib.closing(run):
        screen = Screen(run)
        screen.take(run.poll())
        if not chosen.once and console.is_terminal and not is_over(run):
            follow(run, screen, console)
        print_frame(screen, console)
        if run.is_replaced:
            print(f"keepstep top: another run has begun in {run.folder}", file=sys.stderr)
    return 0


def is_over(run: Run) -> bool:
    """Whether the job has ended, or another run has replaced this one in its folder."""
    return not run.is_alive or run.is_replaced


def print_frame(screen: Screen, console: Console) -> None:
    """Prints one frame, below earlier output."""
    width, height = (console.width, console.height - 1) if console.is_terminal else WITHOUT_TERMINAL
    if not console.is_terminal:
        console.width = width
    console.print(screen.draw(width, height))


def follow(run: Run, screen: Screen, console: Console) -> None:
    """Draws a run over the whole terminal until it is over, or the user presses q or Ctrl-C."""
    handled = {signal.SIGTERM}.intersection(dispositions(Program.VIEW))  # so that it restores the terminal, too
    before = [signal.signal(number, _leave) for number in handled]
    try:
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                was_over = is_over(run)  # before the poll, which then reads everything that the run has written
                screen.take(run.poll())
                live.update(screen.draw(console.width, console.height), refresh=True)
                if was_over or _is_asked_to_leave(keys):
                    return
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Yields the file descriptor of pressed keys, unbuffered; an empty list if the input is not a terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_asked_to_leave(keys: list[int]) -> bool:
    """Waits for a key until the next frame is due. Returns whether it was q."""
    ready, _, _ = select.select(keys, [], [], REFRESH_S)
    if not ready:
        return False
    pressed = os.read(ready[0], 64)
    if not pressed:
        keys.clear()  # the terminal has hung up
    return b"q" in pressed.lower()
