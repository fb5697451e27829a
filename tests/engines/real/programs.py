"""``keepstep weights`` as processes beside real servers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.engines.real.servers import RealServer

DEADLINE_S = 120.0


class Program:
    """``keepstep weights`` as a process, whose output goes to a file."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self.log = log
        command = [sys.executable, "-P", "-m", "keepstep.cli.main", "weights", *map(str, arguments)]
        with log.open("w") as written:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=written)

    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def await_line(self, text: str) -> None:
        """Waits until it has printed a text."""
        wait_until(lambda: text in self.said(), lambda: f"no {text!r} in:\n{self.said()}")

    def stop(self) -> None:
        """Ends it as its supervisor would."""
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.said()

    def kill(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def program(log: Path, *arguments: object) -> Iterator[Program]:
    """A program, which is ended at last."""
    started = Program(log, *arguments)
    try:
        yield started
        started.stop()
    finally:
        started.kill()


def loading(folder: Path, log: Path, *servers: RealServer) -> contextlib.AbstractContextManager[Program]:
    """``keepstep weights load``."""
    return program(log, "load", folder, *(word for each in servers for word in (f"--{each.kind}", each.url)))


def wait_until(is_so: Callable[[], bool], told: Callable[[], str]) -> None:
    """Waits until something is so, and fails the test if it is not in time."""
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s, told()
        threading.Event().wait(0.01)
