"""When a rank takes snapshots of its state, and which of them count.

Every rank has two slots. The copy for step s begins when step s is handed out, and has to be complete before the rank
counts as synced in s. So where one rank has passed the gradient barrier of step s, all hold the snapshot of s, and the
slot of the one before may be written again. No message is needed for that, and whenever ranks are lost there is a
newest step of which all have, or had, a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping


class SnapshotSchedule:
    """When snapshots are due. All ranks count from the step at which they resumed together."""

    def __init__(self, every: int) -> None:
        """Args:
        every: steps from one snapshot to the next; 0: none is taken.
        """
        self.every = every
        self._first = 0

    def resumed(self, step: int) -> None:
        """All ranks stand at this step, and go on from there: a replacement has no snapshot of its own yet."""
        self._first = step

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this step is to be taken, or held already."""
        return self.every > 0 and step >= self._first and (step - self._first) % self.every == 0


def slot_for(step: int, slots: Mapping[int, int], num_slots: int) -> int:
    """The slot for a new snapshot: one that holds none, else that of the older one.

    Args:
        step: of the new one.
        slots: the step in each slot that holds a snapshot; all lie before ``step``.
        num_slots: how many there are.
    """
    empty = [slot for slot in range(num_slots) if slot not in slots]
    if empty:
        return empty[0]
    return min(slots, key=lambda slot: slots[slot])


def outdated(slots: Mapping[int, int], step: int) -> list[int]:
    """The slots whose snapshots count no more when all ranks resume at ``step``: later steps will be computed again."""
    return [slot for slot, held in slots.items() if held > step]
