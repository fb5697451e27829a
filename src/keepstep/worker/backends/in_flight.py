"""The operations of one communicator: the number begun, and those in flight."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Generic, Protocol, TypeVar

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation

PEEK_S = 0.001
"""Interval at which `OperationsInFlight.end_within` polls operations that the script does not wait for, in seconds."""


class Handle(Protocol):
    """A backend's handle of an operation in flight."""

    operation: Operation
    peer: int
    has_failed: bool

    def look(self) -> bool:
        """Polls the operation, without waiting, and notifies its owners if it has ended. Returns whether it has."""
        ...

    @property
    def is_through(self) -> bool:
        """Whether the backend has finished it, with or without an error. Calls no callback."""
        ...


H = TypeVar("H", bound=Handle)


class OperationsInFlight(Generic[H]):
    """The operations of one communicator. Any thread may use it."""

    def __init__(self, changed: threading.Condition) -> None:
        """Args:
        changed: condition of the communicator. Its lock is held for each change, and it is notified when an operation
            ends.
        """
        self._changed = changed
        self._begun: Counter[tuple[int, bool]] = Counter()
        """Number of operations by (peer, whether it is a recv)."""
        self._under_way: dict[H, None] = {}
        """In the order of their beginning. `look_at_the_oldest` polls those that no thread waits for."""
        self._in_background: dict[H, None] = {}
        self._has_background = self._has_failed = False
        """Whether there was an operation in the background (its thread may begin others), and one that failed."""

    @property
    def num_begun(self) -> int:
        """Number of operations that were begun, except for those in the background."""
        return self._begun.total()

    def enter(self, work: H, *, in_background: bool) -> None:
        """Adds an operation that begins. The caller holds the lock of ``changed`` and has checked that it may."""
        if in_background:
            self._in_background[work] = None
            self._has_background = True
        else:
            self._under_way[work] = None
            self._begun[work.peer, work.operation is Operation.RECV] += 1

    def leave(self, work: H) -> None:
        """Removes an operation that has ended, with or without an error."""
        with self._changed:
            self._has_failed |= work.has_failed
            self._under_way.pop(work, None)
            self._in_background.pop(work, None)
            self._changed.notify_all()

    def all(self) -> list[H]:
        """The operations in flight, including those in the background."""
        with self._changed:
            return [*self._under_way, *self._in_background]

    @property
    def may_stay(self) -> bool:
        """Whether the backend has finished all of them, and there were none in the background. Calls no callback."""
        with self._changed:
            return not self._has_background and all(work.is_through for work in self._under_way)

    def claim(self, generation: int) -> GroupClaim | None:
        """Returns this rank's claim on connections that were made in ``generation``; None if they cannot stay."""
        with self._changed:
            if self._has_failed or self._under_way or self._in_background or (ANY_MEMBER, True) in self._begun:
                return None
            begun = dict(self._begun)
        collectives = begun.pop((ALL_MEMBERS, False), 0)
        sent, received = ({peer: n for (peer, is_recv), n in begun.items() if is_recv is by} for by in (False, True))
        return GroupClaim(generation, collectives, sent, received)

    def look_at_the_oldest(self) -> None:
        """Finds operations that have ended though the script does not wait for them. They end nearly in order."""
        while self._under_way:
            with self._changed:
                work = next(iter(self._under_way), None)
            if work is None or not work.look():
                return

    def end_within(self, deadline_s: float) -> bool:
        """Waits up to ``deadline_s`` seconds until no operation is in flight. Returns whether that is so."""
        until = time.monotonic() + deadline_s
        while True:
            ended = [work.look() for work in self.all()]  # not under the lock: `look` notifies others
            left = until - time.monotonic()
            with self._changed:
                if not (self._under_way or self._in_background):
                    return True
                if left <= 0.0:
                    return False
                if not any(ended):
                    self._changed.wait(min(left, PEEK_S))
