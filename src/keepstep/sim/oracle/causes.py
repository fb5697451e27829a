"""The causes of recoveries: how many each fault may begin, and how many began.

A recovery costs every rank some time, so one without a cause is a fault, even if it does no other harm. Each fault may
begin one recovery; a lasting fault that breaks connections repeatedly may begin more.
"""

from __future__ import annotations

from keepstep.protocol.messages import AnyMessage, SafePointReached, StepObserved, WorkerLost
from keepstep.protocol.phases import Phase
from keepstep.sim.oracle.checks import Check, ViolationError

REPEATED_EVERY_S = {"cut data": 2.0, "cut off": 2.0} | dict.fromkeys(
    ("slow", "cut off one way", "loss burst", "agent pause", "controller pause"), 12.0
)
"""Faults that begin a recovery again and again while they last, and how often at most. Where data gets through no
more, ranks wait past their deadline each time that they have come to their next collective. Where orders come late, a
rank waits for the others of its generation in vain, for `keepstep.sim.cluster.worker.CONNECT_DEADLINE_S`."""
HARMLESS = frozenset({"stale report", "connection break", "clock jump", "relay crash", "relay pause", "no room"})
"""Faults that must not begin any. That a node is given up because nothing of it came through is a cause of its own."""


def most_recoveries(kind: str, lasts_s: float) -> int:
    """How many recoveries one fault may begin; node drains and sick devices are counted apart."""
    if kind in HARMLESS or kind in ("node drain", "sick device"):
        return 0
    every_s = REPEATED_EVERY_S.get(kind)
    return 1 if every_s is None else 1 + int(lasts_s / every_s)


class Causes:
    """What has happened that may begin recoveries, and the recoveries that have begun."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        """What has happened -> how many recoveries it may begin."""
        self.num_begun = 0
        """Recoveries that need one of them: not those that follow from a node that was rightly given up."""

    def __len__(self) -> int:
        """How many things have happened."""
        return len(self._most)

    def add(self, what: str, most: int = 1) -> None:
        """Something has happened that may begin so many recoveries; the same thing counts once."""
        self._most[what] = max(most, self._most.get(what, 0))

    def node_leaves(self, node: str, slots: int) -> None:
        """A node drains. Each of its ranks may move by itself, as a spare for it becomes warm.

        What is left is lost with the node. A recovery takes away one rank at least, and none comes back meanwhile.
        """
        self.add(f"{node} drains", slots)

    def begins(self, why: str) -> None:
        """A recovery begins.

        Raises:
            ViolationError: more have begun than all that has happened can have caused.
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
    """Whether this report says that a step was completed."""
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
