"""The other devices that have opened lines to this one, for one purpose each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.protocol.transfer.messages import DeviceCalled, UpdateOffered
from keepstep.weights.lines.line import Flag, Line, LineEnded

Introduction = TypeVar("Introduction", DeviceCalled, UpdateOffered)


class Callers(Generic[Introduction]):
    """Lines that others have opened to this process, the latest of each, and what they said they are for. Any thread.

    One thread, that which publishes or its coordinator, uses the lines and closes those that were replaced.
    """

    def __init__(self) -> None:
        self.changed = Flag()
        """Set when one was added."""
        self._present: dict[int, tuple[Introduction, Line]] = {}
        self._replaced: list[Line] = []
        """Whoever waits on them has been woken."""
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, introduction: Introduction, line: Line, welcome: Callable[[], None]) -> None:
        """A line was opened; the one that this rank had before is closed.

        Args:
            introduction: whose it is, and what for.
            line: belongs to this object from now on.
            welcome: answers it. Once it knows it is here, and it is told nothing else before.

        Raises:
            PeerLost: from ``welcome``, or because nobody is let in any more; the line is not here then.
        """
        with self._lock:
            if self._is_closed:
                raise LineEnded(line.who, "came when all was over")
            welcome()
            if (former := self._present.pop(introduction.rank, None)) is not None:
                former[1].hang_up()
                self._replaced.append(former[1])
            self._present[introduction.rank] = introduction, line
            self.changed.set()

    def present(self) -> dict[int, tuple[Introduction, Line]]:
        """Those that are there, by rank."""
        with self._lock:
            for line in self._replaced:
                line.close()
            self._replaced.clear()
            return dict(self._present)

    def lines(self) -> dict[int, Line]:
        """The lines alone."""
        return {rank: line for rank, (_introduction, line) in self.present().items()}

    def take(self, rank: int, line: Line) -> bool:
        """The line belongs to the caller from now on, unless another one has taken its place."""
        with self._lock:
            if (present := self._present.get(rank)) is None or present[1] is not line:
                return False
            del self._present[rank]
            return True

    def close(self) -> None:
        """Closes all of them; nobody is let in any more."""
        with self._lock:
            self._is_closed = True
        for rank, line in self.lines().items():
            self.take(rank, line)
            line.close()
        self.changed.close()
