"""Runs the event loops of keepstep's programs: no terminal holds one up, and no failure in one goes unnoticed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TextIO, TypeVar

from keepstep.systemcalls import refusal

T = TypeVar("T")

MAX_UNREAD_BYTES = 1 << 20
"""How much output waits for a reader, for each stream: some ten thousand lines. What comes then is dropped."""
UNREAD_S = 10.0
"""How long a program that ends waits for a reader that takes nothing."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a program's coroutine on an event loop of its own, and returns its result.

    Meanwhile writes to ``sys.stdout`` and ``sys.stderr`` neither block nor fail. An exception of a task that no code
    awaits, or of a callback, is printed, and ends the program like one of ``main``.
    """
    try:
        _try_what_a_loop_needs()
        with unblocked():
            return asyncio.run(_supervised(main))
    finally:
        main.close()  # if a thread for the output or the loop itself is refused, it has not begun


def _try_what_a_loop_needs() -> None:
    """Opens the files that a loop opens. If that fails in asyncio, its half-made loop prints a traceback at its end."""
    first, second = socket.socketpair()
    with first, second, first.dup():
        pass


async def _supervised(main: Coroutine[Any, Any, T]) -> T:
    loop, program = asyncio.get_running_loop(), asyncio.current_task()
    assert program is not None
    failures: list[BaseException] = []

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or refusal(error) is None:
            loop.default_exception_handler(context)
        # Others are of a connection, which has ended with it.
        if error is not None and context.keys() & {"task", "future", "handle"}:
            failures.append(error)
            program.cancel()

    loop.set_exception_handler(failed)
    try:
        return await main
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise


@contextlib.contextmanager
def unblocked() -> Iterator[None]:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by streams that never block, until the block exits.

    Their readers may stop to read (Ctrl-S, ``less``, a log shipper that stalls), or leave.
    """
    before = (sys.stdout, sys.stderr)
    streams = [UnblockedStream(stream) if _has_descriptor(stream) else stream for stream in before]
    for stream, other in (streams, reversed(streams)):
        if isinstance(stream, UnblockedStream):
            stream.other = other
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            if isinstance(stream, UnblockedStream):
                stream.finish()


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.flush()
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False


class UnblockedStream(io.TextIOBase):
    """A standard stream whose writes are handed to a thread. The thread may block, its writers do not."""

    def __init__(self, stream: TextIO) -> None:
        self.other: TextIO | io.TextIOBase | None = None
        """The stream that tells why this one is not written any more."""
        self._stream = stream
        self._descriptor = stream.fileno()
        self._line = ""
        """The last line, which is not complete yet."""
        self._changed = threading.Condition()
        self._unread: collections.deque[bytes] = collections.deque()
        self._unread_bytes = 0
        self._num_dropped = 0
        """Lines that were dropped since the last write that went through."""
        self._is_gone = False
        """Whether its reader has left."""
        self._is_closing = False
        self._written_s = time.monotonic()
        self._thread = threading.Thread(target=self._write_all, name=f"keepstep {stream.name}", daemon=True)
        self._thread.start()

    # ---- of a text stream -------------------------------------------------------------------------------------------

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in typeshed
        """The encoding of the stream."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # as above
        """What happens to characters that the encoding lacks."""
        return self._stream.errors

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Hands complete lines to the thread. They are dropped if the reader has left, or has not read for long."""
        with self._changed:
            lines, newline, self._line = (self._line + text).rpartition("\n")
            self._hand_over(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Hands over the last line as well."""
        with self._changed:
            line, self._line = self._line, ""
            self._hand_over(line)

    def _hand_over(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors or "strict")
        if not data or self._is_gone or self._is_closing:
            return
        # Once a line is dropped, all are, until there is room for the line that says so.
        if self._num_dropped or self._unread_bytes + len(data) > MAX_UNREAD_BYTES:
            self._num_dropped += max(1, text.count("\n"))
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything is written, unless the reader takes nothing for `UNREAD_S`."""
        self.flush()
        with self._changed:
            self._is_closing, self._written_s = True, time.monotonic()
            self._changed.notify_all()
            while self._thread.is_alive() and (left_s := self._written_s + UNREAD_S - time.monotonic()) > 0:
                if not self._unread and not self._num_dropped:
                    break
                self._changed.wait(left_s)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except OSError as error:  # EPIPE: its reader has left; EIO: its terminal has; ENOSPC: the disk is full
                self._give_up(error)
                return
            with self._changed:
                self._unread_bytes -= len(data)
                self._unread.popleft()
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            if self._num_dropped and not self._unread:
                told = f"keepstep: {self._num_dropped} lines are missing here, because nobody had read for long\n"
                self._unread.append(told.encode())
                self._unread_bytes += len(told)
                self._num_dropped = 0
            while not self._unread and not self._is_closing:
                self._changed.wait()
            return self._unread[0] if self._unread else None

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
                self._written_s = time.monotonic()
            except BlockingIOError:  # another program has set O_NONBLOCK on the terminal that they share
                select.select([], [self._descriptor], [])

    def _give_up(self, error: OSError) -> None:
        with self._changed:
            self._is_gone = True
            self._unread.clear()
            self._num_dropped = 0
            self._changed.notify_all()
        text = f"keepstep: {self._stream.name} is not written any more, training continues: {error}\n"
        if self.other is not None:
            with contextlib.suppress(OSError, ValueError):
                self.other.write(text)
                self.other.flush()
