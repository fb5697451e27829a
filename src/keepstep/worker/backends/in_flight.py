"""The operations of one communicator: the number begun, and those in flight."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Generic, Protocol, TypeVar

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation

PEEK_S = 0.001
"""How often `OperationsInFlight.end_within` looks at operations that the script does not wait for."""


class Handle(Protocol):
    """An operation under way, as its backend holds it."""

    operation: Operation
    peer: int
    has_failed: bool

    def look(self) -> bool:
        """Whether it has ended; who has to know is told. Without waiting."""
        ...

    @property
    def is_through(self) -> bool:
        """Whether the backend is through with it, well or not. It calls no callback."""
        ...


H = TypeVar("H", bound=Handle)


class OperationsInFlight(Generic[H]):
    """Those of one communicator. For any thread."""

    def __init__(self, changed: threading.Condition) -> None:
        """Args:
        changed: of the communicator: its lock is held for each change, and it is notified of the end of each operation.
        """
        self._changed = changed
        self._begun: Counter[tuple[int, bool]] = Counter()
        """Operations by peer, and whether it was a recv."""
        self._under_way: dict[H, None] = {}
        """In the order in which they were begun. `look_at_the_oldest` looks at those that no thread waits for."""
        self._in_background: dict[H, None] = {}
        self._has_background = self._has_failed = False
        """Whether there was one. What a thread in the background does next cannot be known."""

    @property
    def num_begun(self) -> int:
        """How many operations were begun, except for those in the background."""
        return self._begun.total()

    def enter(self, work: H, *, in_background: bool) -> None:
        """An operation begins. The lock of ``changed`` is held by the caller, who has seen that it may."""
        if in_background:
            self._in_background[work] = None
            self._has_background = True
        else:
            self._under_way[work] = None
            self._begun[work.peer, work.operation is Operation.RECV] += 1

    def leave(self, work: H) -> None:
        """An operation has ended, well or not."""
        with self._changed:
            self._has_failed |= work.has_failed
            self._under_way.pop(work, None)
            self._in_background.pop(work, None)
            self._changed.notify_all()

    def all(self) -> list[H]:
        """What is under way, in the background too."""
        with self._changed:
            return [*self._under_way, *self._in_background]

    @property
    def may_stay(self) -> bool:
        """Whether the backend is through with all of them, and none is in the background. It calls no callback."""
        with self._changed:
            return not self._has_background and all(work.is_through for work in self._under_way)

    def claim(self, generation: int) -> GroupClaim | None:
        """What this rank can say of connections that were made in ``generation``; None, where they cannot stay."""
        with self._changed:
            if self._has_failed or self._under_way or self._in_background or (ANY_MEMBER, True) in self._begun:
                return None
            begun = dict(self._begun)
        collectives = begun.pop((ALL_MEMBERS, False), 0)
        sent, received = ({peer: n for (peer, is_recv), n in begun.items() if is_recv is by} for by in (False, True))
        return GroupClaim(generation, collectives, sent, received)

    def look_at_the_oldest(self) -> None:
        """Notices operations that have ended though the script does not wait for them. They end nearly in order."""
        while self._under_way:
            with self._changed:
                work = next(iter(self._under_way), None)
            if work is None or not work.look():
                return

    def end_within(self, deadline_s: float) -> bool:
        """Whether nothing is under way any more, now or within so many seconds."""
        until = time.monotonic() + deadline_s
        while True:
            ended = [work.look() for work in self.all()]  # not under the lock: what has ended is told to others
            left = until - time.monotonic()
            with self._changed:
                if not (self._under_way or self._in_background):
                    return True
                if left <= 0.0:
                    return False
                if not any(ended):
                    self._changed.wait(min(left, PEEK_S))
