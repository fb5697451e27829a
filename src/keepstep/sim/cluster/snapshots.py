"""The snapshots of simulated processes. They are in memory of the node, which outlives the processes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.protocol.snapshots import SnapshotSchedule, buddy_and_wards, outdated, slot_to_replace
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
    """Memory with the snapshots of a process, and second copies of other ranks. The node keeps it when the process
    ends."""

    def __init__(self) -> None:
        self._slots: dict[int, Snapshot | None] = {}
        """Slot -> its snapshot, None while it is written."""
        self.is_lost = False
        """Whether the node was lost, or its agent has released the memory because the node was evicted."""

    @property
    def whole(self) -> list[Snapshot]:
        """The complete snapshots."""
        return [each for each in self._slots.values() if each is not None]

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Slot -> (rank, step) of the complete snapshot in it."""
        return {slot: (each.rank, each.step) for slot, each in self._slots.items() if each is not None}

    def by_rank(self) -> SnapshotsByRank:
        """Returns the steps of each rank's complete snapshots."""
        ranks = sorted({rank for rank, _step in self.held.values()})
        return tuple((rank, self.steps(rank)) for rank in ranks)

    def steps(self, rank: int | None) -> tuple[int, ...]:
        """Returns the steps of one rank's complete snapshots, ascending."""
        return tuple(sorted(step for whose, step in self.held.values() if whose == rank))

    def find(self, rank: int | None, step: int) -> Snapshot | None:
        """Returns a rank's snapshot of a step; None if there is none."""
        return next((each for each in self._slots.values() if each and (each.rank, each.step) == (rank, step)), None)

    def open(self, rank: int, kept_step: int | None) -> int:
        """Opens a slot for a new snapshot of a rank, and returns its number.

        Args:
            rank: the rank.
            kept_step: snapshots of this step must not be overwritten.
        """
        slot = slot_to_replace(self.held, rank, kept_step)
        slot = next(number for number in itertools.count() if number not in self._slots) if slot is None else slot
        self._slots[slot] = None
        return slot

    def seal(self, slot: int, snapshot: Snapshot) -> None:
        """Marks the snapshot in a slot as complete."""
        self._slots[slot] = snapshot

    def discard(self, slot: int) -> None:
        """Discards the snapshot in a slot."""
        self._slots.pop(slot, None)


class SimulatedSnapshots:
    """The snapshots of a process. It uses the same schedule as `keepstep.worker.step.snapshots`."""

    def __init__(self, memory: SimulatedMemory, every: int, on_moment: Callable[[SnapshotMoment, int], None]) -> None:
        self._memory = memory
        self._on_moment = on_moment
        self._schedule = SnapshotSchedule(every)
        self.buddy: int | None = None
        self._wards: tuple[int, ...] = ()
        self._copy: tuple[int, int, Snapshot] | None = None
        """(number, slot, snapshot) of the copy in progress."""
        self._is_copied = False
        """Whether all of it is there."""
        self._is_confirmed = True
        """Whether the copy in progress may be loaded once it is complete."""
        self._num_copies = 0
        self._inherited: dict[tuple[int, int], SimulatedMemory] = {}
        """(rank, step) -> other memory of the node that has this snapshot."""
        self.kept_step: int | None = None
        """The step whose snapshots must not be overwritten before all ranks have snapshots again."""
        self.unsent: int | None = None
        """The step of the snapshot that the buddy does not have yet."""

    @property
    def is_copying(self) -> bool:
        """Whether a copy is in progress."""
        return self._copy is not None

    def is_complete(self, step: int) -> bool:
        """Returns whether the snapshots allow the rank to become synced in a step."""
        return not self.is_copying and not (self.unsent is not None and self._schedule.is_second_copy_due(step))

    def steps(self, rank: int | None) -> tuple[int, ...]:
        """Returns the steps that a process with this rank can go back to, ascending."""
        inherited = {step for whose, step in self._inherited if whose == rank}
        return tuple(sorted({*inherited, *self._memory.steps(rank)}))

    def inherit(self, memory: SimulatedMemory, rank: int, steps: tuple[int, ...]) -> None:
        """Gives access to a rank's snapshots in other memory, to a process that takes this rank or sends its state."""
        self._inherited |= {(rank, step): memory for step in steps}

    def hand_out(self, snapshot: Snapshot, *, is_compared: bool) -> int | None:
        """Begins a copy of the state of a yielded step, if one is due. Returns its number; None if none begins.

        Args:
            snapshot: the state.
            is_compared: whether the copy may be loaded only after `confirm`.
        """
        if self._copy or not self._schedule.is_due(snapshot.step):
            return None
        if self._memory.find(snapshot.rank, snapshot.step):
            return None
        slot = self._memory.open(snapshot.rank, self.kept_step)
        self._num_copies += 1
        self._copy, self._is_confirmed, self._is_copied = (self._num_copies, slot, snapshot), not is_compared, False
        self._on_moment(SnapshotMoment.BEGUN, snapshot.step)
        return self._num_copies

    def copied(self, number: int) -> Snapshot | None:
        """Completes a copy. Returns its snapshot; None if the copy was cancelled."""
        if self._copy is None or self._copy[0] != number:
            return None
        self._is_copied = True
        return self._sealed()

    def confirm(self, parameters: History) -> Snapshot | None:
        """Lets the copy in progress be loaded: it is what the replicas hold. Returns it if it is complete."""
        self._is_confirmed = True
        if self._copy is not None:
            number, slot, snapshot = self._copy
            self._copy = number, slot, dataclasses.replace(snapshot, parameters=parameters)
        return self._sealed()

    def _sealed(self) -> Snapshot | None:
        if self._copy is None or not (self._is_copied and self._is_confirmed):
            return None
        _, slot, snapshot = self._copy
        self._memory.seal(slot, snapshot)
        self._copy, self._is_copied = None, False
        self._on_moment(SnapshotMoment.COMPLETE, snapshot.step)
        return snapshot

    def cancel(self) -> None:
        """Cancels the copy in progress, because the state is about to change."""
        if self._copy is not None:
            self._memory.discard(self._copy[1])
        self._copy, self._is_copied, self._is_confirmed = None, False, True

    def find(self, rank: int, step: int) -> Snapshot | None:
        """Returns the snapshot to load or send, from its own or inherited memory; None if there is none."""
        inherited = self._inherited.get((rank, step), self._memory)
        return self._memory.find(rank, step) or inherited.find(rank, step)

    def load(self, rank: int, step: int) -> Snapshot | None:
        """Returns the snapshot to load, and records this moment; None if there is none."""
        if (found := self.find(rank, step)) is not None:
            self._on_moment(SnapshotMoment.LOADED, step)
        return found

    def resumed(self, step: int, machine: WorkerMachine) -> None:
        """Handles the recovery's end: the process is at the resume step, and later snapshots are invalid."""
        self.cancel()
        for slot in outdated(self._memory.held, step):
            self._memory.discard(slot)
        self._inherited = {key: memory for key, memory in self._inherited.items() if key[1] <= step}
        self.unsent = None
        self._schedule.resumed(step, machine.membership)
        assert machine.rank is not None
        self.buddy, self._wards = None, ()
        if self._schedule.every and machine.membership is not None:
            self.buddy, self._wards = buddy_and_wards(machine.membership, machine.rank)

    def doubled(self, step: int) -> bool:
        """Handles the completion of a second copy. Returns whether the process has waited for it."""
        if self.unsent != step:
            return False
        self.unsent = None
        return True

    def passed_barrier(self, rank: int | None) -> None:
        """Handles the end of a gradient barrier: all ranks have snapshots again.

        Args:
            rank: the rank of this process.
        """
        self._inherited.clear()
        if self.kept_step is not None:
            self.kept_step = None
            guarded = {rank, *self._wards}
            for slot, (whose, _step) in self._memory.held.items():
                if whose not in guarded:
                    self._memory.discard(slot)

    def is_due(self, step: int) -> bool:
        """Returns whether every rank that is synced in a step has a snapshot of it."""
        return self._schedule.is_due(step)
