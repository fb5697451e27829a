"""The groups of one simulated process: its operations in them, and which of them stay in a recovery.

It works like `keepstep.worker.groups.registry`: a stop closes the groups, ranks claim those that are intact, and decide
with the same `why_rebuilt` which of them stay. `keepstep.sim.cluster.collectives` models when an operation ends.

All ranks have one group, the world. The process decides on its operations there (`enter_world`). Restored state and
second copies of snapshots use its connections, too.

In a mesh a step has up to four more operations. At the end of the forward each copy of the model runs a broadcast. Its
root differs from one to the next, and does not wait for the others. When a member begins its backward, it may send a
message to the next member of its copy, which receives it at the end of its own backward. Then the replicas of each
shard reduce their gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Protocol

from keepstep.errors import InternalError
from keepstep.protocol.kept_groups import GroupClaim, why_rebuilt
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation, OperationCount
from keepstep.sim.cluster.collectives import WORLD, GroupOperation, Key
from keepstep.sim.cluster.groups.mesh import MeshGroup, groups_of

if TYPE_CHECKING:
    from keepstep.sim.world import World

Claims = dict[str, GroupClaim]
"""Name of a group -> the claim of one rank."""


class GroupMember(Protocol):
    """The interface of a process that its groups use."""

    process: int
    cohort: int | None

    @property
    def rank(self) -> int:
        """Its rank in the job."""

    @property
    def place(self) -> str:
        """The name of its node."""

    @property
    def step(self) -> int:
        """The step that it is in."""

    def wait_in(self, key: Key) -> None:
        """Makes its training thread wait in an operation, until `SimulatedGroups.ended`."""


@dataclasses.dataclass(slots=True)
class SimulatedGroup:
    """One process's end of a group. Its counters start at 0 when the connections are made."""

    group: MeshGroup
    rank: int
    """The rank of this process in the group."""
    cohort: int
    """The cohort in which it was connected. With the group's name it identifies the connections."""
    generation: int
    is_open: bool = True
    is_whole: bool = True
    """Whether no operation has failed or was interrupted on these connections."""
    collectives: int = 0
    sent: dict[int, int] = dataclasses.field(default_factory=dict)
    received: dict[int, int] = dataclasses.field(default_factory=dict)
    under_way: Key | None = None
    """The operation that this process waits in."""

    def close(self) -> None:
        """Closes the group for new operations. Interrupts an operation in progress, and breaks all connections then."""
        self.is_open = False
        if self.under_way is not None:
            self.is_whole, self.under_way = False, None

    def claim(self) -> GroupClaim | None:
        """Returns this process's claim for the connections, None if they are not intact. See `Communicator.claim`."""
        if self.is_open or not self.is_whole or self.under_way is not None:
            return None
        return GroupClaim(self.generation, self.collectives, dict(self.sent), dict(self.received))


class SimulatedGroups:
    """The groups of one process. It has none until it is connected."""

    def __init__(self, world: World, member: GroupMember) -> None:
        self._world = world
        self._member = member
        self._groups: dict[str, SimulatedGroup] = {}
        self._to_do: list[Operation] = []
        """The operations that the script has still to do before its phase is over."""

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step, and with it the forward."""
        self._to_do = [Operation.BROADCAST] if self._world.layout.has_mesh else []

    def begin_backward(self) -> None:
        """Begins the backward."""
        self._to_do = [Operation.ALL_REDUCE] if self._world.layout.has_mesh else []
        if self._world.layout.has_mesh and self._world.layout.sends_in_mesh:
            self._send(self._of_kind(holds_one_shard=False))
            self._to_do.insert(0, Operation.RECV)

    def waits(self) -> bool:
        """Starts the remaining operations of the phase. Returns whether the process waits in one of them now."""
        while self._to_do:
            match self._to_do.pop(0):
                case Operation.BROADCAST:
                    waits = self._broadcast(self._of_kind(holds_one_shard=False))
                case Operation.RECV:
                    waits = self._receive(self._of_kind(holds_one_shard=False))
                case _:
                    waits = self._reduce(self._of_kind(holds_one_shard=True))
            if waits:
                return True
        return False

    def enter_world(self, step: int, what: str, part: int) -> None:
        """Enters a collective of all ranks.

        Args:
            step: the step.
            what: which of the step's collectives of all ranks.
            part: the value that this rank sends.
        """
        world, member = self._groups[WORLD], self._member
        self._check_open(world)
        world.collectives += 1
        world.under_way = key = (world.cohort, world.collectives, WORLD)
        member.wait_in(key)
        self._world.oracle.groups.meets(member.process, key, (member.cohort or 0, step, what))
        self._world.collectives.enter(key, member.process, member.rank, member.place, part)

    def begin_transfer(self, generation: int, name: str, num_members: int) -> None:
        """Begins to move state from or to this process, on the world's connections.

        Args:
            generation: the generation of the recovery.
            name: the name of the transfer.
            num_members: the number of its sources and receivers.
        """
        world = self._groups[WORLD]
        world.under_way = key = (world.cohort, generation, name)
        self._world.oracle.groups.began(WORLD, key, num_members)

    def end_transfer(self) -> None:
        """Ends the transfer: this process has received or sent all of its part."""
        world = self._groups[WORLD]
        if world.under_way is not None:
            self._world.oracle.groups.ended(WORLD, world.under_way)
            world.under_way = None

    def begin_second_copy(self) -> None:
        """Marks the world as not intact: a thread sends a snapshot on its connections, at a time unknown to ranks."""
        world = self._groups[WORLD]
        world.is_whole = False
        self._world.oracle.groups.cut(WORLD, world.cohort, self._member.process)

    def _of_kind(self, *, holds_one_shard: bool) -> SimulatedGroup:
        return next(each for each in self._groups.values() if each.group.holds_one_shard is holds_one_shard)

    def _broadcast(self, group: SimulatedGroup) -> bool:
        """Begins a broadcast, each time from another root. The root leaves before the others receive or even enter."""
        members = group.group.members
        group.collectives += 1
        root = members[group.collectives % len(members)]
        key = (group.cohort, group.collectives, group.group.name)
        operation = GroupOperation(group.group.name, (root,), len(members))
        return self._begin(group, key, operation, waits=root != self._member.rank)

    def _reduce(self, group: SimulatedGroup) -> bool:
        """Begins an all-reduce."""
        group.collectives += 1
        key = (group.cohort, group.collectives, group.group.name)
        members = group.group.members
        return self._begin(group, key, GroupOperation(group.group.name, members, len(members)), waits=True)

    def _send(self, group: SimulatedGroup) -> None:
        """Sends a message to the next member, which does not wait for it yet."""
        to = group.rank + 1
        if to < len(group.group.members):
            number = group.sent[to] = group.sent.get(to, 0) + 1
            self._begin(group, *self._message(group, number, group.rank), waits=False)

    def _receive(self, group: SimulatedGroup) -> bool:
        """Waits for the message of the previous member. Returns whether there is one."""
        source = group.rank - 1
        if source < 0:
            return False
        number = group.received[source] = group.received.get(source, 0) + 1
        return self._begin(group, *self._message(group, number, source), waits=True)

    def _message(self, group: SimulatedGroup, number: int, source: int) -> tuple[Key, GroupOperation]:
        name = group.group.name
        return (group.cohort, number, f"{name} {source}"), GroupOperation(name, (group.group.members[source],), 2)

    def _begin(self, group: SimulatedGroup, key: Key, operation: GroupOperation, *, waits: bool) -> bool:
        member = self._member
        self._check_open(group)
        if waits:
            group.under_way = key
            member.wait_in(key)
        self._world.collectives.enter(key, member.process, member.rank, member.place, self._attempt(), operation)
        return waits

    def _check_open(self, group: SimulatedGroup) -> None:
        if not group.is_open:
            raise InternalError(f"rank {self._member.rank} begins what is closed: {group}")

    def _attempt(self) -> int:
        """Returns a number for the attempt at the step. A value of one attempt must never be received in another."""
        return (self._member.cohort or 0) << 32 | self._member.step

    def ended(self, key: Key, rows: tuple[int, ...]) -> bool:
        """Ends the operation that this process waited in. Returns False if it is a collective of all ranks."""
        for group in self._groups.values():
            if group.under_way == key:
                group.under_way = None
                if group.group.name == WORLD:
                    return False
                self._world.oracle.groups.received(self._member.process, key, rows, self._attempt())
                return True
        return False

    def count(self) -> OperationCount | None:
        """Returns the counts on the tag page of the operation that the process waits in; None: it waits in none."""
        group = next((each for each in self._groups.values() if each.under_way is not None), None)
        if group is None or group.under_way is None:
            return None
        _cohort, number, of = group.under_way
        name = group.group.name
        if name == WORLD:
            return OperationCount(WORLD, Operation.BARRIER, ALL_MEMBERS, number, number - 1)
        if of != name:
            return OperationCount(name, Operation.RECV, group.rank - 1, number, number - 1)
        operation = Operation.ALL_REDUCE if group.group.holds_one_shard else Operation.BROADCAST
        return OperationCount(name, operation, ALL_MEMBERS, number, number - 1)

    # ---- a recovery -------------------------------------------------------------------------------------------------

    def take_down(self) -> None:
        """Closes all groups, and breaks those with an operation in progress."""
        for group in self._groups.values():
            group.close()

    def claims(self, replaced: Set[int]) -> Claims:
        """Returns the claims with which this process connects.

        Args:
            replaced: ranks that are known to be held by other processes than before. Groups with them have no claim.
        """
        possible = {
            name: each.claim() for name, each in self._groups.items() if replaced.isdisjoint(each.group.members)
        }
        return {name: claim for name, claim in possible.items() if claim is not None}

    def connect(self, generation: int, cohort: int, said: Mapping[int, Mapping[int, Claims]]) -> None:
        """Opens the groups that stay, and connects the others.

        Args:
            generation: the new generation.
            cohort: the cohort in which the process is connected.
            said: cohort -> rank -> its claims.
        """
        claimed = said[cohort]
        mine = claimed[self._member.rank]
        for group in groups_of(self._world.layout.shards, self._world.layout.has_mesh):
            if self._member.rank not in group.members:
                continue
            claims = [claimed[member].get(group.name) for member in group.members]
            stays = group.name in mine and why_rebuilt(claims) is None
            self._world.oracle.groups.connects(self._member.process, group.name, cohort, stays=stays)
            if stays:
                self._groups[group.name].is_open = True
            else:
                rank = group.members.index(self._member.rank)
                self._groups[group.name] = SimulatedGroup(group, rank, cohort, generation)
