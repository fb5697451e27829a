"""Which snapshots there are: what the oracle has seen to be copied, in memory that is still there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.cluster.snapshots import Snapshot
    from keepstep.sim.world import World


class SnapshotWatch:
    """Watches one run's snapshots."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[int, set[int]] = {}
        """process -> the steps of which it has, or had, a whole snapshot that is of no later past than all ranks'."""

    def taken(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        """A process has a snapshot more; its other slot may hold the one before."""
        if snapshot.parameters != tuple(range(snapshot.step)) or snapshot.shard != self._world.shard_of(
            worker.machine.rank
        ):
            raise ViolationError(
                Check.SNAPSHOT, f"{worker} has a snapshot of step {snapshot.step} with {snapshot.parameters}"
            )
        held = self._held.setdefault(worker.process, set())
        held.add(snapshot.step)
        held.intersection_update(sorted(held)[-2:])

    def passed_barrier(self, worker: SimulatedProcess, members: Iterable[SimulatedProcess], step: int) -> None:
        """A process leaves the gradient barrier: of each shard there is a snapshot of this step, if one was due.

        Not of each rank: a lost one may have been all that was missing, and where its shard has a replica the others
        complete the step without it.
        """
        if not worker.snapshots.is_due(step):
            return
        shards = set(self._world.layout.shards)
        shards -= {
            self._world.shard_of(each.machine.rank) for each in members if step in self._held.get(each.process, ())
        }
        if shards:
            raise ViolationError(
                Check.SNAPSHOT, f"{worker} leaves the barrier of step {step}, of which shards {shards} have no snapshot"
            )

    def resumes(self, step: int) -> None:
        """All ranks go on from a step: what lies behind it is no past of theirs."""
        for held in self._held.values():
            held.difference_update({later for later in held if later > step})

    def newest(self, is_there: Callable[[SimulatedProcess], bool]) -> int | None:
        """The newest step of which every shard is in some memory that is there, on the node of the rank's holder.

        Args:
            is_there: whether the node of a process is up, and was never given up since.
        """
        by_shard: dict[str, set[int]] = {shard: set() for shard in self._world.layout.shards}
        holders = {worker.machine.rank: worker for worker in self._world.rank_holders()}
        for worker in self._world.workers.values():
            holder = holders.get(worker.machine.rank, worker)
            is_on_node = worker.node is holder.node and not worker.memory.is_lost
            if worker.machine.rank is not None and is_on_node and is_there(worker):
                by_shard[self._world.shard_of(worker.machine.rank)] |= self._held.get(worker.process, set())
        return max(set.intersection(*by_shard.values()), default=None)
