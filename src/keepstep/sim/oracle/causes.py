"""The causes of recoveries: how many recoveries each event may cause, and how many have begun.

A recovery costs every rank some time, so one without a cause is a bug, even if it does no other harm. Each fault may
cause one recovery; a lasting fault that breaks connections repeatedly may cause more.
"""

from __future__ import annotations

from keepstep.protocol.messages import AnyMessage, SafePointReached, StepObserved, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.sim.oracle.checks import Check, ViolationError

REPEATED_EVERY_S = {"cut data": 2.0, "cut off": 2.0} | dict.fromkeys(
    ("slow", "cut off one way", "silent together", "loss burst", "agent pause", "controller pause"), 12.0
)
"""Kind of a fault that may cause recoveries repeatedly while it lasts -> the least time between two of them.

If ranks cannot reach each other, they wait past the deadline in each next collective. If orders are late, a rank waits
in vain for the others of its generation, for `keepstep.sim.cluster.worker.CONNECT_DEADLINE_S`.
"""
HARMLESS = frozenset({"stale report", "connection break", "clock jump", "relay crash", "relay pause"})
"""Faults that must not cause a recovery. The eviction of a node that was silent is a separate cause."""


def most_recoveries(kind: str, lasts_s: float) -> int:
    """Returns how many recoveries a fault may cause. What is counted separately causes none.

    Args:
        kind: the kind of the fault.
        lasts_s: how long it lasts.
    """
    if kind in HARMLESS or kind in ("node drain", "sick device", "refused load", "wrong load"):
        return 0
    every_s = REPEATED_EVERY_S.get(kind)
    return 1 if every_s is None else 1 + int(lasts_s / every_s)


class Causes:
    """The events that may cause recoveries, and the number of recoveries that have begun."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        """Event -> how many recoveries it may cause."""
        self.num_begun = 0
        """Number of recoveries that need a cause. Those after the rightful eviction of a node do not count."""

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self._most)

    def add(self, what: str, most: int = 1) -> None:
        """Adds an event that may cause up to ``most`` recoveries. The same event counts once."""
        self._most[what] = max(most, self._most.get(what, 0))

    def node_leaves(self, node: str, slots: int) -> None:
        """Adds the drain of a node as a cause of one recovery per slot.

        Each of its ranks may move in a recovery of its own, when a spare becomes warm. The other ranks are lost with
        the node. Each recovery removes at least one rank from the node, and none comes back meanwhile.
        """
        self.add(f"{node} drains", slots)

    def begins(self, why: str) -> None:
        """Counts a recovery that begins.

        Raises:
            ViolationError: more recoveries have begun than the events can have caused.
        """
        self.num_begun += 1
        most = sum(self._most.values())
        if self.num_begun > most:
            known = f"{most} at most: {', '.join(self._most)}" if most else "none"
            raise ViolationError(
                Check.NO_CAUSE,
                f"recovery {self.num_begun} begins ({why}), and what has happened may begin {known}",
            )


def tells_of_step(message: AnyMessage) -> bool:
    """Returns whether this report shows that a step was completed."""
    match message:
        case StepObserved():
            return True
        case SafePointReached():
            return min(message.reach, default=0) > 0
        case WorkerLost():
            tag = message.tag
            return tag is not None and (tag.step > 0 or (tag.step == 0 and tag.phase is Phase.UPDATED))
        case _:
            return False
