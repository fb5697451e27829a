"""Checks of placement: the right spare takes a rank, local ranks are valid, and ranks get the right membership.

After a software fault a spare on the lost rank's own node is best, then one in its failure domain, because their
hardware is known to work. After the loss of a node it is the other way around. The oracle checks this only if a single
fault has hit the job: then nothing is in quarantine, and the oracle knows what the controller knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keepstep.protocol.controller import JournalEntry, ReportsReceived
from keepstep.protocol.messages import AnyMessage, Assign, Member, Membership, WorkerReady
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss: of a rank's process on a node, or of the node itself."""

    node: str
    is_of_node: bool


class SpareChoice:
    """Tracks the spares that the controller knows to be warm, and checks its choice.

    The controller handles the reports of a packet one after the other. When it decides at one report, it does not know
    the later ones.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._warm: set[int] = set()
        """Numbers of spares that are at their first step, as the controller knows."""
        self._in_packets: set[int] = set()
        """Numbers of spares whose report is in a packet that the controller has not handled yet."""
        self._in_event: set[int] = set()
        """Numbers of spares whose report is in the newest event."""
        self._given: set[int] = set()
        """Numbers of workers that have got a rank since."""
        self._domains = {node.name: node.domain for node in world.layout.nodes}

    def heard(self, messages: Iterable[AnyMessage]) -> None:
        """Records messages that have arrived at the controller."""
        ready = {message.worker for message in messages if isinstance(message, WorkerReady)}
        if ready:
            self._in_packets |= {spare.number for spare in self._world.spares() if spare.number in ready - self._given}

    def given(self, entry: JournalEntry) -> list[SimulatedProcess]:
        """Returns the warm spares to which the controller gives ranks in this journal entry."""
        given = {order.worker for _, order, _ in entry.orders if isinstance(order, Assign)}
        reports = entry.event.reports if isinstance(entry.event, ReportsReceived) else ()
        told = [each.worker for each in reports if isinstance(each, WorkerReady)]
        first = {each.worker for each in reports[:1] if isinstance(each, WorkerReady)}  # known at any of the others
        self._warm |= self._in_event | (self._in_packets & first)
        self._in_event = self._in_packets.intersection(told) - first
        self._in_packets.difference_update(told)
        was_warm = given & (self._warm | self._in_event)
        self._given |= given
        self._warm -= given
        self._in_event -= given
        return [worker for worker in self._world.workers.values() if worker.number in was_warm] if was_warm else []

    def check(self, given: Iterable[SimulatedProcess], loss: Loss | None) -> None:
        """Checks that no remaining warm spare is at a better place than one that got a rank.

        Args:
            given: the spares that got ranks.
            loss: the only loss so far. None: there was none, or more than one, and nothing is checked.

        Raises:
            ViolationError: a remaining spare is at a better place.
        """
        if loss is None:
            return
        left = [spare for spare in self._world.spares() if spare.number in self._warm]
        for worker in given:
            for spare in left:
                nearer = self._near(spare, loss.node) - self._near(worker, loss.node)
                if nearer < 0 if loss.is_of_node else nearer > 0:
                    what = "that was lost with its node" if loss.is_of_node else "whose process alone was lost"
                    raise ViolationError(
                        Check.SPARE_CHOICE,
                        f"{worker} on {worker.node.name} takes the place of a rank of {loss.node} {what}, and "
                        f"worker {spare.number} on {spare.node.name} was free",
                    )

    def _near(self, worker: SimulatedProcess, lost_on: str) -> int:
        name = worker.node.name
        return (name == lost_on) + (self._domains[name] == self._domains[lost_on])


class MembershipWatch:
    """Compares the memberships that ranks have received with their real placement, and with each other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[int, Membership] = {}
        """generation -> the membership of the first rank that began a step in it."""

    def begins_step(self, worker: SimulatedProcess) -> None:
        """Checks the membership of a rank that begins a step.

        Raises:
            ViolationError: its entry for this rank is wrong, or another rank of the generation has another membership.
        """
        machine, told = worker.machine, worker.machine.membership
        if told is None or machine.rank is None:
            raise ViolationError(Check.MEMBERSHIP, f"{worker} trains and was told no membership")
        node = worker.node.name
        domain = next(each.domain for each in self._world.layout.nodes if each.name == node)
        shard = self._world.shard_of(machine.rank)
        own = Member(worker.number, node, shard, "" if domain == node else domain)
        if told.world_size != self._world.layout.world_size or told.member(machine.rank) != own:
            raise ViolationError(Check.MEMBERSHIP, f"{worker} is {own}, and was told {told}")
        others = self._told.setdefault(machine.generation, told)
        if others is not told and others != told:
            raise ViolationError(Check.MEMBERSHIP, f"{worker} was told {told}, and another rank {others}")


def check_local_ranks(members: dict[int, SimulatedProcess]) -> None:
    """Checks that local ranks are unique on each node, and below the local world size.

    Args:
        members: rank -> its process.

    Raises:
        ViolationError: a local rank is missing, out of range or not unique.
    """
    taken: dict[tuple[str, int], int] = {}
    for rank, worker in members.items():
        local_rank = worker.local_rank
        if local_rank is None or not 0 <= local_rank < worker.local_world_size:
            raise ViolationError(
                Check.LOCAL_RANKS, f"{worker} has local rank {local_rank} of {worker.local_world_size}"
            )
        other = taken.setdefault((worker.node.name, local_rank), rank)
        if other != rank:
            raise ViolationError(
                Check.LOCAL_RANKS,
                f"ranks {other} and {rank} are both {local_rank} of {worker.node.name}",
            )
