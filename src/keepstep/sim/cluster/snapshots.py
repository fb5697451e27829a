"""The snapshots of one simulated process, in memory of its node, which outlives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from keepstep.protocol.messages import Membership
from keepstep.protocol.snapshots import SnapshotSchedule, outdated, slot_for
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.sim.cluster.values import History, Rows

NUM_SLOTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's state at one step."""

    step: int
    shard: str | None
    parameters: History
    rows: Rows


class SimulatedMemory:
    """Two slots, which the node holds as well as the process."""

    def __init__(self) -> None:
        self.slots: dict[int, Snapshot] = {}
        self.is_lost = False
        """It has gone with its node, or its agent has let go of it because the node was given up."""

    @property
    def steps(self) -> dict[int, int]:
        """The step of the whole snapshot in each slot that has one."""
        return {slot: snapshot.step for slot, snapshot in self.slots.items()}

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return next((each for each in self.slots.values() if each.step == step), None)


class SimulatedSnapshots:
    """What a process does with its memory: as `keepstep.worker.step.snapshots` does, with the same schedule."""

    def __init__(self, memory: SimulatedMemory, every: int, on_moment: Callable[[SnapshotMoment, int], None]) -> None:
        self._memory = memory
        self._on_moment = on_moment
        self._schedule = SnapshotSchedule(every)
        self._copy: tuple[int, int, Snapshot] | None = None
        """Its number, its slot, and what will be there."""
        self._num_copies = 0
        self._inherited: dict[int, SimulatedMemory] = {}
        """By step, that of processes which held this rank before."""

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot is being taken."""
        return self._copy is not None

    def steps(self) -> tuple[int, ...]:
        """The steps that the process can go back to, ascending."""
        return tuple(sorted({*self._inherited, *self._memory.steps.values()}))

    def inherit(self, memory: SimulatedMemory, steps: tuple[int, ...]) -> None:
        """The process takes the rank of one that is gone."""
        self._inherited |= dict.fromkeys(steps, memory)

    def hand_out(self, snapshot: Snapshot) -> int | None:
        """A step is handed out, with this state; the number of the copy that begins, if one does."""
        steps = self._memory.steps
        if self._copy or not self._schedule.is_due(snapshot.step) or snapshot.step in steps.values():
            return None
        slot = slot_for(steps, NUM_SLOTS)
        self._memory.slots.pop(slot, None)
        self._num_copies += 1
        self._copy = (self._num_copies, slot, snapshot)
        self._on_moment(SnapshotMoment.BEGUN, snapshot.step)
        return self._num_copies

    def copied(self, number: int) -> Snapshot | None:
        """A copy is through: what is in the memory now, unless it was cut off."""
        if self._copy is None or self._copy[0] != number:
            return None
        _, slot, snapshot = self._copy
        self._memory.slots[slot] = snapshot
        self._copy = None
        self._on_moment(SnapshotMoment.COMPLETE, snapshot.step)
        return snapshot

    def cancel(self) -> None:
        """The state is about to be written."""
        self._copy = None

    def find(self, step: int) -> Snapshot | None:
        """What to go back to, if there is any of that step."""
        found = self._memory.find(step)
        if found is None and step in self._inherited:
            found = self._inherited[step].find(step)
        if found is not None:
            self._on_moment(SnapshotMoment.LOADED, step)
        return found

    def resumed(self, step: int, membership: Membership | None) -> None:
        """The process stands at the step at which all resume."""
        self.cancel()
        for slot in outdated(self._memory.steps, step):
            del self._memory.slots[slot]
        self._inherited = {held: memory for held, memory in self._inherited.items() if held <= step}
        self._schedule.resumed(step, membership)

    def passed_barrier(self) -> None:
        """Every rank has a snapshot of its own again."""
        self._inherited.clear()

    def is_due(self, step: int) -> bool:
        """Whether every rank that is synced in a step has a snapshot of it."""
        return self._schedule.is_due(step)
