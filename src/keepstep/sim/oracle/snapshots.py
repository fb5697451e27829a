"""Which snapshots there are: what the oracle has seen to be copied, in memory that is still there."""

from __future__ import annotations

import math
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
        self._whole_s: dict[tuple[int, int, int], float] = {}
        """Process, rank and step -> since when that process has, or had, all of a snapshot of no later past than all
        ranks'."""

    def taken(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        """A process has a snapshot more; its memory holds the one before, too."""
        self._check(worker, snapshot)
        if snapshot.rank != worker.machine.rank:
            raise ViolationError(Check.SNAPSHOT, f"{worker} takes a snapshot as rank {snapshot.rank}")

    def doubled(self, buddy: SimulatedProcess, snapshot: Snapshot) -> None:
        """A process has all of another rank's snapshot."""
        self._check(buddy, snapshot)

    def _check(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        is_right = snapshot.parameters == tuple(range(snapshot.step))
        if not is_right or snapshot.shard != self._world.shard_of(snapshot.rank):
            raise ViolationError(Check.SNAPSHOT, f"{worker} has {snapshot}")
        self._whole_s[worker.process, snapshot.rank, snapshot.step] = self._world.schedule.now_s

    def passed_barrier(self, worker: SimulatedProcess, members: Iterable[SimulatedProcess], step: int) -> None:
        """A process leaves the gradient barrier: of each shard there is a snapshot of this step, if one was due.

        Not of each rank: a lost one may have been all that was missing, and where its shard has a replica the others
        complete the step without it.
        """
        if not worker.snapshots.is_due(step):
            return
        shards = set(self._world.layout.shards)
        shards -= {
            self._world.shard_of(each.machine.rank)
            for each in members
            if (each.process, each.machine.rank, step) in self._whole_s
        }
        if shards:
            raise ViolationError(
                Check.SNAPSHOT, f"{worker} leaves the barrier of step {step}, of which shards {shards} have no snapshot"
            )

    def survivable(self, worker: SimulatedProcess) -> set[str | None]:
        """The nodes without which all ranks could go on, from what is alive or from some snapshot of all.

        None is among them if they could go back to a snapshot without any loss.

        Args:
            worker: one that trains. Of a process that the others train without there is nothing to say: none.
        """
        cohorts = self._world.oracle.cohorts
        if not self._world.layout.snapshot_every or worker.cohort != len(cohorts):
            return set()
        members = list(cohorts[-1].members.values())
        if not all(each.is_alive and each.node.is_up for each in members):
            return set()
        shards = self._nodes_of(members, lambda each: each.node.is_up)
        common = set.intersection(*map(set, shards.values()))
        nodes = {None, *(each.node.name for each in members)}
        live: dict[str, set[str | None]] = {}
        for each in members:
            live.setdefault(self._world.shard_of(each.machine.rank), set()).add(each.node.name)
        found = nodes - {None} - _alone(live.values())
        return found.union(*(nodes - _alone(at[step] for at in shards.values()) for step in common))

    def survives_any_node(self, worker: SimulatedProcess, step: int) -> None:
        """A process leaves the gradient barrier: whichever node is lost next, all ranks can go on.

        So it is where the job is on several nodes, and nothing is lost already.
        """
        survivable = self.survivable(worker)
        nodes = {each.node.name for each in self._world.oracle.cohorts[-1].members.values()}
        if survivable and len(nodes) > 1 and (vital := nodes - survivable):
            raise ViolationError(Check.SNAPSHOT, f"the loss of {vital} in step {step} would leave no snapshot")

    def written_over(self, before: set[str | None], worker: SimulatedProcess) -> None:
        """A process has begun to write a snapshot over an older one. What could be survived before it still can be.

        Args:
            before: `survivable` of that moment.
            worker: in whose memory.
        """
        if before and (vital := before - self.survivable(worker)):
            raise ViolationError(Check.SNAPSHOT, f"{worker} writes over a snapshot that the loss of {vital} would need")

    def resumes(self, step: int) -> None:
        """All ranks go on from a step: what lies behind it is no past of theirs. They start anew where it is -1."""
        self._whole_s = {key: since_s for key, since_s in self._whole_s.items() if key[2] <= step}

    def newest(self, is_there: Callable[[SimulatedProcess], bool]) -> int | None:
        """The newest step of which every shard was in some memory when the recovery began, and is there.

        A snapshot that was complete only then may have come too late for what its rank has told.

        Args:
            is_there: whether the node of a process is up, and was never given up since.
        """
        shards = self._nodes_of(self._world.rank_holders(), is_there, self._world.recovery_began_s)
        return max(set.intersection(*map(set, shards.values())), default=None)

    def _nodes_of(
        self,
        holders: Iterable[SimulatedProcess],
        is_there: Callable[[SimulatedProcess], bool],
        before_s: float = math.inf,
    ) -> dict[str, dict[int, set[str | None]]]:
        """For each shard the nodes that have a snapshot of it, by step.

        A rank's own snapshot counts on the node of the rank's holder, a second copy where its keeper is alive.
        """
        shards: dict[str, dict[int, set[str | None]]] = {shard: {} for shard in self._world.layout.shards}
        by_rank = {worker.machine.rank: worker for worker in holders}
        for worker in self._world.workers.values():
            rank = worker.machine.rank
            if rank is None or worker.memory.is_lost or not is_there(worker):
                continue
            is_on_node = worker.node is by_rank.get(rank, worker).node
            for whose, step in worker.memory.held.values():
                is_whole = self._whole_s.get((worker.process, whose, step), math.inf) <= before_s
                if is_whole and (is_on_node if whose == rank else worker.is_alive):
                    shards[self._world.shard_of(whose)].setdefault(step, set()).add(worker.node.name)
        return shards


def _alone(places: Iterable[set[str | None]]) -> set[str | None]:
    """Those that are some place's only one."""
    return set().union(*(there for there in places if len(there) == 1))
