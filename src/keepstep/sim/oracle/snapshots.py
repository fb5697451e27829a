"""The oracle's checks of snapshots: those that it has seen copied, in memory that still exists."""

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
        """(process, rank, step) -> when the process has completed this rank's snapshot of this step. Snapshots of steps
        after the resume step are removed."""
        self._last_left: tuple[int | None, int] | None = None
        """(cohort, step) of the gradient barrier that a process has left last."""

    def taken(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        """Checks a snapshot that a process has taken."""
        self.complete(worker, snapshot)
        if snapshot.rank != worker.machine.rank:
            raise ViolationError(Check.SNAPSHOT, f"{worker} takes a snapshot as rank {snapshot.rank}")

    def complete(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        """Checks a snapshot that is complete in a process's memory: its own, or a second copy."""
        is_right = snapshot.parameters == tuple(range(snapshot.step))
        if not is_right or snapshot.shard != self._world.shard_of(snapshot.rank):
            raise ViolationError(Check.SNAPSHOT, f"{worker} has {snapshot}")
        self._whole_s[worker.process, snapshot.rank, snapshot.step] = self._world.schedule.now_s

    def passed_barrier(self, worker: SimulatedProcess, members: Iterable[SimulatedProcess], step: int) -> None:
        """Checks at the end of a gradient barrier that each shard has a snapshot of this step, if one is due.

        A single rank may have none: it may have been lost before it was synced, and if its shard has a replica, the
        others complete the step without it.
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

    def survives_any_node(self, worker: SimulatedProcess, step: int) -> None:
        """Checks, when the first process leaves the gradient barrier, that all ranks can survive the loss of any node.

        It checks this only if the job is on several nodes, and nothing is lost already. `written_over` checks snapshots
        that are overwritten later.
        """
        if not self._world.layout.snapshot_every or self._last_left == (worker.cohort, step):
            return
        self._last_left = (worker.cohort, step)
        survivable, nodes = self._survivable(worker), self._nodes()
        vital = nodes - survivable if survivable and len(nodes) > 1 else set()
        if vital:
            raise ViolationError(Check.SNAPSHOT, f"the loss of {vital} in step {step} would leave no snapshot")

    def written_over(self, worker: SimulatedProcess, before: list[Snapshot]) -> None:
        """Checks that an overwritten snapshot is not needed to survive the loss of a node.

        Args:
            worker: the process in whose memory a snapshot may have been overwritten.
            before: the complete snapshots that were there before.
        """
        gone = [each for each in before if not any(each is other for other in worker.memory.whole)]
        if not gone or (after := self._survivable(worker)) == {None, *self._nodes()}:
            return
        if vital := self._survivable(worker, gone) - after:
            raise ViolationError(Check.SNAPSHOT, f"{worker} writes over a snapshot that the loss of {vital} would need")

    def _nodes(self) -> set[str]:
        """Returns the nodes of the ranks."""
        return {each.node.name for each in self._world.oracle.cohorts[-1].members.values()}

    def _survivable(self, worker: SimulatedProcess, besides: list[Snapshot] | None = None) -> set[str | None]:
        """Returns the nodes whose loss the job can survive.

        All shards must then have a live copy, or all a snapshot of the same step. The result contains None if all ranks
        could go back to a snapshot without a loss.

        Args:
            worker: a process that trains. If it is not in the newest cohort, the result is empty.
            besides: snapshots that count as if they were in its memory.
        """
        cohorts = self._world.oracle.cohorts
        if not self._world.layout.snapshot_every or worker.cohort != len(cohorts):
            return set()
        members = list(cohorts[-1].members.values())
        if not all(each.is_alive and each.node.is_up for each in members):
            return set()
        shards = self._nodes_of(members, lambda each: each.node.is_up)
        for gone in besides or ():
            shards[self._world.shard_of(gone.rank)].setdefault(gone.step, set()).add(worker.node.name)
        common = set.intersection(*map(set, shards.values()))
        nodes = {None, *self._nodes()}
        live: dict[str, set[str | None]] = {}
        for each in members:
            live.setdefault(self._world.shard_of(each.machine.rank), set()).add(each.node.name)
        found = nodes - {None} - _alone(live.values())
        return found.union(*(nodes - _alone(at[step] for at in shards.values()) for step in common))

    def resumes(self, step: int) -> None:
        """Forgets the snapshots of steps after the resume step. A step of -1 forgets all, because all ranks restart."""
        self._whole_s = {key: since_s for key, since_s in self._whole_s.items() if key[2] <= step}

    def newest(self, is_there: Callable[[SimulatedProcess], bool]) -> int | None:
        """Returns the newest step of which every shard has a snapshot that was complete when the recovery began.

        A later snapshot may have been too late for its rank's report.

        Args:
            is_there: returns whether the memory of a process can still be read.
        """
        shards = self._nodes_of(self._world.rank_holders(), is_there, self._world.recovery_began_s)
        return max(set.intersection(*map(set, shards.values())), default=None)

    def steps_of(self, is_there: Callable[[SimulatedProcess], bool]) -> dict[str, set[int]]:
        """Returns for each shard the steps of its snapshots in all memory that can be read.

        Args:
            is_there: returns whether the memory of a process can be read.
        """
        shards: dict[str, set[int]] = {shard: set() for shard in self._world.layout.shards}
        for worker in self._world.workers.values():
            if not worker.memory.is_lost and is_there(worker):
                for each in worker.memory.whole:
                    shards[self._world.shard_of(each.rank)].add(each.step)
        return shards

    def _nodes_of(
        self,
        holders: Iterable[SimulatedProcess],
        is_there: Callable[[SimulatedProcess], bool],
        before_s: float = math.inf,
    ) -> dict[str, dict[int, set[str | None]]]:
        """Returns for each shard: step -> the nodes that have a snapshot of it.

        A rank's own snapshot counts if it is on the node of the rank's holder, a second copy if its keeper is alive.

        Args:
            holders: the live processes with a rank.
            is_there: returns whether the memory of a process can be read.
            before_s: later snapshots do not count.
        """
        shards: dict[str, dict[int, set[str | None]]] = {shard: {} for shard in self._world.layout.shards}
        node_of = {worker.machine.rank: worker.node for worker in holders}
        for worker in self._world.workers.values():  # the oracle's innermost loop, written for speed
            rank, node = worker.machine.rank, worker.node
            if rank is None or worker.memory.is_lost or not is_there(worker):
                continue
            is_on_node, is_alive = node is node_of.get(rank, node), worker.is_alive
            for each in worker.memory.whole:
                if not (is_on_node if each.rank == rank else is_alive):
                    continue
                if self._whole_s.get((worker.process, each.rank, each.step), math.inf) > before_s:
                    continue
                at = shards[self._world.shard_of(each.rank)]
                if each.step in at:
                    at[each.step].add(node.name)
                else:
                    at[each.step] = {node.name}
        return shards


def _alone(places: Iterable[set[str | None]]) -> set[str | None]:
    """Returns the nodes that are the only one in one of these sets."""
    return set().union(*(there for there in places if len(there) == 1))
