"""The existing snapshots, as the oracle has seen them copied, in memory that still exists."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from keepstep.protocol.snapshots import START_COPIES
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
        self._last_left: tuple[int | None, int] | None = None
        """The cohort and the step whose gradient barrier a process left last."""
        self._num_doubled: Counter[int] = Counter()
        """By process how many second copies of its snapshots there were."""
        self._refused: set[int] = set()
        """Ranks whose newest snapshot has no second copy, for their buddy's node had no room."""
        self._num_exposed = 0
        """Steps in a row in which some have none, though there is room somewhere."""

    def taken(self, worker: SimulatedProcess, snapshot: Snapshot) -> None:
        """A process has a snapshot more; its memory holds the one before, too."""
        self._check(worker, snapshot)
        if snapshot.rank != worker.machine.rank:
            raise ViolationError(Check.SNAPSHOT, f"{worker} takes a snapshot as rank {snapshot.rank}")

    def doubled(self, buddy: SimulatedProcess, source: SimulatedProcess, snapshot: Snapshot) -> None:
        """A process has all of another rank's snapshot."""
        self._check(buddy, snapshot)
        self._num_doubled[source.process] += 1
        self._refused.discard(snapshot.rank)

    def refused(self, source: SimulatedProcess, snapshot: Snapshot) -> None:
        """A node has no room for a second copy. A job that has just begun may end for it.

        Its agent may tell that the process died before what the process has said of the reason gets through, and the
        recovery that begins then ends with the job.
        """
        self._refused.add(snapshot.rank)
        if len(self._world.oracle.cohorts) == 1 and self._num_doubled[source.process] < START_COPIES:
            self._world.oracle.excuses("no room for a second copy at the start")
            self._world.oracle.causes.add(f"no room for a second copy of process {source.process}")

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

    def survives_any_node(self, worker: SimulatedProcess, step: int) -> None:
        """A process leaves the gradient barrier, the first of all: whichever node is lost next, all ranks can go on.

        So it is where the job is on several nodes, and nothing is lost already. What is written over later has a check
        of its own.
        """
        if not self._world.layout.snapshot_every or self._last_left == (worker.cohort, step):
            return
        self._last_left = (worker.cohort, step)
        survivable, nodes = self._survivable(worker), self._nodes()
        vital = nodes - survivable if survivable and len(nodes) > 1 else set()
        if vital - self._exposed():
            raise ViolationError(Check.SNAPSHOT, f"the loss of {vital} in step {step} would leave no snapshot")
        has_room = any(self._world.nodes[node].has_room for node in nodes - vital)
        self._num_exposed = self._num_exposed + 1 if vital and has_room else 0
        if self._num_exposed > self._most_exposed():
            raise ViolationError(
                Check.SNAPSHOT, f"for {self._num_exposed} steps {vital} alone have snapshots, and others have room"
            )

    def _exposed(self) -> set[str | None]:
        """The nodes of ranks whose newest snapshot has no second copy."""
        return {each.node.name for each in self._world.rank_holders() if each.machine.rank in self._refused}

    def _most_exposed(self) -> int:
        """For how many steps a rank may be refused where there is room: each of them once by each node, one after the
        other, with one snapshot each."""
        layout = self._world.layout
        return layout.snapshot_every * (layout.world_size * len(layout.nodes) + 2)

    def written_over(self, worker: SimulatedProcess, before: list[Snapshot]) -> None:
        """A process may have begun to write over a snapshot. What could be survived before it still can be.

        Args:
            worker: in whose memory.
            before: the whole snapshots there before.
        """
        gone = [each for each in before if not any(each is other for other in worker.memory.whole)]
        if not gone or (after := self._survivable(worker)) == {None, *self._nodes()}:
            return
        if vital := self._survivable(worker, gone) - after - self._exposed():
            raise ViolationError(Check.SNAPSHOT, f"{worker} writes over a snapshot that the loss of {vital} would need")

    def _nodes(self) -> set[str]:
        """Those of the ranks."""
        return {each.node.name for each in self._world.oracle.cohorts[-1].members.values()}

    def _survivable(self, worker: SimulatedProcess, besides: list[Snapshot] | None = None) -> set[str | None]:
        """The nodes without which all ranks could go on, from what is alive or from some snapshot of all.

        None is among them if they could go back to a snapshot without any loss.

        Args:
            worker: one that trains. Of a process that the others train without there is nothing to say: none.
            besides: more snapshots, as if they were in its memory.
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
        """All ranks go on from a step: what lies behind it is no past of theirs. They restart where it is -1."""
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
        node_of = {worker.machine.rank: worker.node for worker in holders}
        for worker in self._world.workers.values():  # the oracle's innermost loop: as flat as it can be
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
    """Those that are some place's only one."""
    return set().union(*(there for there in places if len(there) == 1))
