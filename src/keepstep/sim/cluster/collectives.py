"""Simulated collectives, which may end on some ranks and not on others, and the rendezvous of a group.

A collective ends on a rank when the data of every member has arrived there. The data of a member that dies, or breaks
its connections, may reach some ranks and not others: the seed decides which.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepstep.protocol.kept_groups import GroupClaim
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

WORLD = "world"
"""The name of the group of all ranks."""
Key = tuple[int, int, str]
"""(cohort that connected the group, number of the operation since then, name of the group or transfer)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupOperation:
    """One member's view of an operation in another group than the world."""

    group: str
    needs: tuple[int, ...]
    """The ranks whose parts the member waits for."""
    num_members: int
    """Number of ranks that take part."""


@dataclasses.dataclass(slots=True)
class Collective:
    """One collective of all ranks, or one operation of a group."""

    key: Key
    operation: GroupOperation | None = None
    """None for a collective of all ranks."""
    inside: dict[int, str] = dataclasses.field(default_factory=dict)
    """process -> its node, for the processes that have entered and not left."""
    given: dict[int, str] = dataclasses.field(default_factory=dict)
    """rank -> its node, for the ranks that have sent their part."""
    parts: dict[int, int] = dataclasses.field(default_factory=dict)
    """rank -> the value that it sends to all others."""
    rows: tuple[int, ...] = ()
    """All needed parts, ordered by rank, once they are complete."""
    was_left: bool = False
    """Whether a member has left early, so that its part may not reach all others."""
    deaf: set[int] = dataclasses.field(default_factory=set)
    """Processes that the part of such a member will never reach."""

    @property
    def group(self) -> str:
        """The group's name."""
        return WORLD if self.operation is None else self.operation.group


class Collectives:
    """All collectives and group operations in progress."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[Key, Collective] = {}

    def enter(
        self, key: Key, process: int, rank: int, node: str, part: int, operation: GroupOperation | None = None
    ) -> None:
        """Enters a rank with its part.

        When it has received all other parts, `SimulatedWorker.collective_ended` is called. A rank of a group that needs
        only its own part leaves at once.

        Args:
            key: names the operation.
            process: the process that enters.
            rank: its rank.
            node: the name of its node.
            part: the value that it sends to the others.
            operation: what it does in a group; None: a collective of all ranks.
        """
        if (collective := self._open.get(key)) is None:
            collective = self._open[key] = Collective(key, operation)
        collective.given[rank] = node
        collective.parts[rank] = part
        if operation is not None:
            self._enter_group(collective, process, rank, operation)
            return
        self._world.oracle.groups.began(WORLD, key, self._world.layout.world_size)
        collective.inside[process] = node
        self._look(collective)

    def _enter_group(self, collective: Collective, process: int, rank: int, operation: GroupOperation) -> None:
        watch = self._world.oracle.groups
        watch.began(operation.group, collective.key, operation.num_members)
        if operation.needs == (rank,):
            watch.ended(operation.group, collective.key)
            self._look(collective)
            self._close_if_empty(collective)
            return
        collective.inside[process] = collective.given[rank]
        # If one part is needed, it may be there already; other members look when they enter.
        self._look(collective, None if len(operation.needs) > 1 else process)

    def leave(self, process: int) -> None:
        """Removes a process that has ended or broken its connections. Its part may never reach some of the others."""
        for collective in list(self._open.values()):
            if process not in collective.inside:
                continue
            del collective.inside[process]
            collective.deaf.discard(process)
            collective.was_left = True
            self._world.oracle.groups.cut(collective.group, collective.key[0], process)
            for other in collective.inside:
                if self._world.coin():
                    delay_s = self._world.rng.uniform(0.0, 0.02)
                    self._world.schedule.after(delay_s, Event(f"worker {other}", "peer_reset", (collective.key,)))
            self._close_if_empty(collective)

    def arrived(self, key: Key, process: int) -> None:
        """Handles the arrival of the last part at a process."""
        if not self.awaits(key, process):
            return
        worker = self._world.workers[process]
        if worker.is_stopped:
            worker.parts_arrived(key)  # once it goes on
            return
        collective = self._open[key]
        if collective.was_left and self._world.coin():
            collective.deaf.add(process)
            return
        del collective.inside[process]
        self._world.oracle.groups.ended(collective.group, key)
        self._close_if_empty(collective)
        worker.collective_ended(key, collective.rows)

    def awaits(self, key: Key, process: int) -> bool:
        """Returns whether a process still waits in an operation and can receive the parts in transit to it."""
        collective = self._open.get(key)
        return collective is not None and process in collective.inside and process not in collective.deaf

    def look_again(self) -> None:
        """Checks all operations again, because a network direction has opened."""
        for collective in list(self._open.values()):
            self._look(collective)

    def _look(self, collective: Collective, process: int | None = None) -> None:
        """Sends the parts, if all are there, to the processes that wait, or only to one that has just entered."""
        operation = collective.operation
        if operation is None:
            if len(collective.given) < self._world.layout.world_size:
                return
            collective.rows = collective.rows or tuple(collective.parts[rank] for rank in sorted(collective.parts))
            sources = set(collective.given.values())
        else:
            if any(rank not in collective.given for rank in operation.needs):
                return
            collective.rows = collective.rows or tuple(collective.parts[rank] for rank in operation.needs)
            sources = {collective.given[rank] for rank in operation.needs}
        inside = collective.inside
        for other in inside if process is None else (process,):
            if other not in collective.deaf and self._world.network.all_reach(sources, inside[other]):
                delay_s = self._world.draw(self._world.layout.durations.collective_s)
                event = Event("collectives", "arrived", (collective.key, other))
                self._world.schedule.after(delay_s, event)

    def _close_if_empty(self, collective: Collective) -> None:
        operation = collective.operation
        size = self._world.layout.world_size if operation is None else operation.num_members
        if not collective.inside and len(collective.given) == size:
            del self._open[collective.key]


class SimulatedRendezvous:
    """The controller's rendezvous of the members of a generation's groups. A crash of the controller empties it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[int, dict[int, int]] = {}
        """generation -> rank -> process."""
        self._claims: dict[int, dict[int, dict[str, GroupClaim]]] = {}
        """generation -> rank -> its claims for its groups."""
        self.said: dict[int, dict[int, dict[str, GroupClaim]]] = {}
        """cohort -> rank -> its claims for its groups, once all ranks have come."""

    def come(self, generation: int, rank: int, process: int, claims: dict[str, GroupClaim]) -> None:
        """Registers a rank that is ready to connect. When all are, `SimulatedWorker.groups_connected` is called.

        Args:
            generation: the generation to connect in.
            rank: the rank.
            process: the process that holds it.
            claims: see `SimulatedGroups.claims`.
        """
        controller = self._world.controller
        if not controller.is_up or generation < controller.machine.job.generation:
            return  # no controller is there to answer, or the generation is over
        waiting = self._waiting.setdefault(generation, {})
        if (other := waiting.get(rank, process)) != process:
            self._world.oracle.came_twice(rank, process, other)
        waiting[rank] = process
        self._claims.setdefault(generation, {})[rank] = claims
        if len(waiting) == self._world.layout.world_size:
            members = self._waiting.pop(generation)
            cohort = self._world.oracle.connected({rank: self._world.workers[p] for rank, p in members.items()})
            self.said[cohort.number] = self._claims.pop(generation)
            for member in members.values():
                delay_s = self._world.draw(self._world.layout.durations.connect_s)
                event = Event(f"worker {member}", "groups_connected", (generation, cohort.number))
                self._world.schedule.after(delay_s, event)

    def leave(self, process: int) -> None:
        """Removes a process, which waits no longer."""
        for waiting in self._waiting.values():
            for rank in [rank for rank, member in waiting.items() if member == process]:
                del waiting[rank]

    def forget(self) -> None:
        """Forgets all ranks, because the controller has crashed."""
        self._waiting.clear()
        self._claims.clear()
