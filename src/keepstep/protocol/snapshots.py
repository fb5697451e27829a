"""When a rank takes snapshots of its state, and which of them count.

Every rank has two slots. The copy for step s begins when step s is handed out, and has to be complete before the rank
counts as synced in s. So where one rank has passed the gradient barrier of step s, all hold the snapshot of s, and the
slot of the one before may be written again. No message is needed for that, and whenever ranks are lost there is a
newest step of which all have, or had, a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from keepstep.protocol.messages import Membership

NUM_TRIALS = 5
"""Steps of each generation that have a snapshot each, to measure what one costs. Of a new job's first one there is no
optimizer state yet, and the next two touch the memory for the first time, a slot each."""
SHARE = 0.01
"""What snapshots may cost by themselves, of the time of all steps."""


class SnapshotSchedule:
    """When snapshots are due. All ranks count from the step at which they resumed together."""

    def __init__(self, wanted: int | None) -> None:
        """Args:
        wanted: steps from one snapshot to the next; 0: none is taken; None: as few as a shard without replicas
            needs, and as cost `SHARE`.
        """
        self._wanted = wanted
        self._first = 0
        self._every: int | None = 0

    @property
    def every(self) -> int | None:
        """Steps from one snapshot to the next; 0: none is taken; None: it is being measured."""
        return self._every

    def resumed(self, step: int, membership: Membership | None) -> None:
        """All ranks stand at this step, and go on from there: a replacement has no snapshot of its own yet.

        Args:
            step: the step.
            membership: of the generation.
        """
        self._first = step
        self._every = self._wanted
        if self._wanted is None and not (membership and has_lone_shards(membership)):
            self._every = 0

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this step is to be taken, or held already."""
        if self._every == 0:
            return False
        return (step - self._first) % (self._every or 1) == 0

    def is_agreed_in(self, step: int) -> bool:
        """Whether the ranks agree in this step's gradient barrier how often snapshots are taken from then on."""
        return self._every is None and step == self._first + NUM_TRIALS - 1

    def agreed(self, every: int) -> None:
        """They have: none takes them more often than the one that asked for the fewest."""
        self._every = every


def has_lone_shards(membership: Membership) -> bool:
    """Whether some rank holds what no other one does."""
    return any(len(ranks) == 1 for ranks in membership.replicas.values())


def fewest_steps(cost_s: float, step_s: float) -> int:
    """How many steps must lie between two snapshots, so that they cost no more than `SHARE` of the time.

    Args:
        cost_s: by how much a snapshot makes a step longer.
        step_s: how long a step takes.
    """
    return max(1, math.ceil(cost_s / (SHARE * step_s)))


def slot_for(slots: Mapping[int, int], num_slots: int) -> int:
    """The slot for a new snapshot: one that holds none, else that of the older one.

    Args:
        slots: the step in each slot that holds a snapshot; all lie before that of the new one.
        num_slots: how many there are.
    """
    return min(range(num_slots), key=lambda slot: slots.get(slot, -1))


def outdated(slots: Mapping[int, int], step: int) -> list[int]:
    """The slots whose snapshots count no more when all ranks resume at ``step``: later steps will be computed again."""
    return [slot for slot, held in slots.items() if held > step]
