"""The loop around the coordinator's machine: one update, in a thread of rank 0."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.transfer.messages import DeviceFailed, DevicePrepared, MovementSeen, UpdateOffered
from keepstep.protocol.transfer.update import Agreement, Terms, UpdateMachine, Verdict
from keepstep.weights.lines.line import Flag, Line, LineEnded, wait


class Callers:
    """Lines that others have opened to this process, the latest of each. Any thread."""

    def __init__(self) -> None:
        self.changed = Flag()
        """Set when one was added."""
        self._lines: dict[int, Line] = {}
        self._replaced: list[Line] = []
        """Whoever waits on them has been woken; they are closed by the thread that uses these lines."""
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, rank: int, line: Line, welcome: Callable[[], None]) -> None:
        """A line was opened; the one that this rank had before is closed.

        Args:
            rank: whose.
            line: belongs to this object from now on.
            welcome: answers it. Once it knows it is here, and it is told nothing else before.

        Raises:
            PeerLost: from ``welcome``, or because nobody is let in any more; the line is not here then.
        """
        with self._lock:
            if self._is_closed:
                raise LineEnded(line.who, "came when all was over")
            welcome()
            if (former := self._lines.pop(rank, None)) is not None:
                former.hang_up()
                self._replaced.append(former)
            self._lines[rank] = line
            self.changed.set()

    def remove(self, rank: int, line: Line) -> None:
        """A line has ended."""
        with self._lock:
            if self._lines.get(rank) is line:
                del self._lines[rank]
        line.close()

    def lines(self) -> dict[int, Line]:
        """Those that are there, by rank. For the one thread that uses them."""
        with self._lock:
            for line in self._replaced:
                line.close()
            self._replaced.clear()
            return dict(self._lines)

    def close(self) -> None:
        """Closes all of them; nobody is let in any more."""
        with self._lock:
            self._is_closed = True
        for rank, line in self.lines().items():
            self.remove(rank, line)
        self.changed.close()


class Coordinator:
    """Collects the reports of all devices, and tells each verdict to all of them.

    It also says that it is there, so that nobody takes a long update for a lost coordinator.
    """

    def __init__(self, terms: Terms, callers: Callers, sign_s: float, former: Agreement | None) -> None:
        """Args:
        terms: of the update.
        callers: lines to the devices; more may come.
        sign_s: how often it says that it is there.
        former: the agreement of the update before.
        """
        self._machine = UpdateMachine(terms, time.monotonic(), former)
        self._callers, self._sign_s = callers, sign_s

    @property
    def agreement(self) -> Agreement | None:
        """For the next update."""
        return self._machine.agreement

    def run(self) -> None:
        """Until the update has ended, one way or the other."""
        machine = self._machine
        sign_due_s = time.monotonic() + self._sign_s
        while not machine.is_over:
            self._callers.changed.clear()
            lines = self._callers.lines()
            awaited: list[Line | Flag] = [self._callers.changed, *lines.values()]
            ready = wait(awaited, min(sign_due_s, machine.deadline_s))
            verdicts: list[Verdict] = []
            for rank, line in lines.items():
                if line in ready:
                    verdicts += self._hear(rank, line)
            now_s = time.monotonic()
            verdicts += machine.tick(now_s)
            self._tell(*verdicts)
            if now_s >= sign_due_s:
                self._tell(MovementSeen(0))
                sign_due_s = now_s + self._sign_s

    def _hear(self, rank: int, line: Line) -> list[Verdict]:
        try:
            message = line.receive_now()
        except (PeerLost, RemoteProtocolError) as error:
            self._callers.remove(rank, line)
            return self._machine.lost(rank, str(error))
        match message:
            case None:
                return []
            case UpdateOffered() | MovementSeen() | DevicePrepared() | DeviceFailed():
                return self._machine.receive(rank, message, time.monotonic())
            case other:
                self._callers.remove(rank, line)
                return self._machine.lost(rank, f"it sent {other!r:.80}")

    def _tell(self, *messages: Verdict | MovementSeen) -> None:
        """Tells all devices. One that cannot be told is lost, and that may be a verdict too."""
        untold = deque(messages)
        while untold:
            message = untold.popleft()
            for rank, line in self._callers.lines().items():
                try:
                    line.send(message, time.monotonic() + self._sign_s)
                except PeerLost as error:
                    self._callers.remove(rank, line)
                    untold += self._machine.lost(rank, str(error))
