"""The snapshots of simulated processes, in memory of their nodes, which outlives them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.protocol.snapshots import NUM_KEPT, SecondCopyPlan, SnapshotSchedule, outdated, slot_to_replace
from keepstep.protocol.worker import WorkerMachine
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.sim.cluster.values import History, Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's state at one step."""

    rank: int
    step: int
    shard: str | None
    parameters: History
    rows: Rows


class SimulatedMemory:
    """What a process has its snapshots in, and those of other ranks; its node holds it as well."""

    def __init__(self) -> None:
        self._slots: dict[int, Snapshot | None] = {}
        """None while it is written."""
        self.is_lost = False
        """It has gone with its node, or its agent has let go of it because the node was given up."""

    @property
    def whole(self) -> list[Snapshot]:
        """The whole snapshots."""
        return [each for each in self._slots.values() if each is not None]

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """The rank and step of the whole snapshot in each slot that has one."""
        return {slot: (each.rank, each.step) for slot, each in self._slots.items() if each is not None}

    def by_rank(self) -> SnapshotsByRank:
        """The steps of each rank's whole snapshots."""
        ranks = sorted({rank for rank, _step in self.held.values()})
        return tuple((rank, self.steps(rank)) for rank in ranks)

    def steps(self, rank: int | None) -> tuple[int, ...]:
        """Those of one rank's snapshots, ascending."""
        return tuple(sorted(step for whose, step in self.held.values() if whose == rank))

    def find(self, rank: int | None, step: int) -> Snapshot | None:
        """The snapshot of a step."""
        return next((each for each in self._slots.values() if each and (each.rank, each.step) == (rank, step)), None)

    def has_slot(self, rank: int) -> bool:
        """Whether the next snapshot of a rank is written over one of its own, and takes no more memory."""
        return len(self.steps(rank)) >= NUM_KEPT

    def open(self, rank: int, kept_step: int | None) -> int:
        """The slot for a new snapshot of a rank."""
        slot = slot_to_replace(self.held, rank, kept_step)
        slot = next(number for number in itertools.count() if number not in self._slots) if slot is None else slot
        self._slots[slot] = None
        return slot

    def seal(self, slot: int, snapshot: Snapshot) -> None:
        """All of it is there."""
        self._slots[slot] = snapshot

    def discard(self, slot: int) -> None:
        """What is in a slot counts no more."""
        self._slots.pop(slot, None)


class SimulatedSnapshots:
    """What a process does with its memory: as `keepstep.worker.step.snapshots` does, with the same schedule."""

    def __init__(self, memory: SimulatedMemory, every: int, on_moment: Callable[[SnapshotMoment, int], None]) -> None:
        self._memory = memory
        self._on_moment = on_moment
        self._schedule = SnapshotSchedule(every)
        self.plan = SecondCopyPlan()
        self._copy: tuple[int, int, Snapshot] | None = None
        """Its number, its slot, and what will be there."""
        self._num_copies = 0
        self._inherited: dict[tuple[int, int], SimulatedMemory] = {}
        """By rank and step, other memory of the node."""
        self.kept_step: int | None = None
        """That must not be written over before all ranks have their snapshots again."""
        self.unsent: int | None = None
        """The step of the snapshot that the buddy does not have yet."""

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot is being taken."""
        return self._copy is not None

    def is_complete(self, step: int) -> bool:
        """Whether the rank may say that it is synced in a step."""
        return not self.is_copying and not (self.unsent is not None and self._schedule.is_second_copy_due(step))

    def steps(self, rank: int | None) -> tuple[int, ...]:
        """The steps that the process can go back to, ascending."""
        inherited = {step for whose, step in self._inherited if whose == rank}
        return tuple(sorted({*inherited, *self._memory.steps(rank)}))

    def inherit(self, memory: SimulatedMemory, rank: int, steps: tuple[int, ...]) -> None:
        """The process takes the rank of one that is gone, or is to send its state."""
        self._inherited |= {(rank, step): memory for step in steps}

    def hand_out(self, snapshot: Snapshot) -> int | None:
        """A step is handed out, with this state; the number of the copy that begins, if one does."""
        if self._copy or not self._schedule.is_due(snapshot.step):
            return None
        if self._memory.find(snapshot.rank, snapshot.step):
            return None
        slot = self._memory.open(snapshot.rank, self.kept_step)
        self._num_copies += 1
        self._copy = (self._num_copies, slot, snapshot)
        self._on_moment(SnapshotMoment.BEGUN, snapshot.step)
        return self._num_copies

    def copied(self, number: int) -> Snapshot | None:
        """A copy is through: what is in the memory now, unless it was cut off."""
        if self._copy is None or self._copy[0] != number:
            return None
        _, slot, snapshot = self._copy
        self._memory.seal(slot, snapshot)
        self._copy = None
        self._on_moment(SnapshotMoment.COMPLETE, snapshot.step)
        return snapshot

    def cancel(self) -> None:
        """The state is about to be written."""
        if self._copy is not None:
            self._memory.discard(self._copy[1])
        self._copy = None

    def find(self, rank: int, step: int) -> Snapshot | None:
        """What to go back to, or to send, if there is any of that step."""
        inherited = self._inherited.get((rank, step), self._memory)
        return self._memory.find(rank, step) or inherited.find(rank, step)

    def load(self, rank: int, step: int) -> Snapshot | None:
        """What to go back to, if there is any of that step."""
        if (found := self.find(rank, step)) is not None:
            self._on_moment(SnapshotMoment.LOADED, step)
        return found

    def resumed(self, step: int, machine: WorkerMachine) -> None:
        """The process stands at the step at which all resume, as its machine knows."""
        self.cancel()
        for slot in outdated(self._memory.held, step):
            self._memory.discard(slot)
        self._inherited = {key: memory for key, memory in self._inherited.items() if key[1] <= step}
        self.unsent = None
        self._schedule.resumed(step, machine.membership)
        assert machine.rank is not None
        self.plan.resumed(machine.rank, machine.membership if self._schedule.every else None, machine.generation)

    def doubled(self, step: int) -> bool:
        """The buddy has all of a snapshot; whether that was waited for."""
        if self.unsent != step:
            return False
        self.unsent = None
        if self.plan.lacks_room:
            self._on_moment(SnapshotMoment.DOUBLED, step)
        self.plan.doubled()
        return True

    def refused(self, step: int) -> bool:
        """The buddy's node has no room for a snapshot; whether the job goes on without its second copy."""
        self.unsent = None
        self._on_moment(SnapshotMoment.REFUSED, step)
        return self.plan.refused()

    def contribution(self, step: int) -> int:
        """The process's number in the gradient barrier of a step."""
        return self.plan.contribution() if self._schedule.is_second_copy_due(step) else 0

    def passed_barrier(self, rank: int | None, heard: int) -> None:
        """Every rank has its snapshots again; the greatest number that any has said."""
        self._inherited.clear()
        if self.kept_step is not None:
            self.kept_step = None
            guarded = {rank, *self.plan.wards}
            for slot, (whose, _step) in self._memory.held.items():
                if whose not in guarded:
                    self._memory.discard(slot)
        self.plan.reduced(heard)

    def is_due(self, step: int) -> bool:
        """Whether every rank that is synced in a step has a snapshot of it."""
        return self._schedule.is_due(step)
