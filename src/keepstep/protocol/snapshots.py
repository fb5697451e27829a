"""When a rank takes snapshots of its state, where they are kept, and which of them count.

A rank keeps its two newest snapshots in memory of its node. Where all that hold a shard would be lost with one node or
failure domain, another rank keeps a second copy of each of them: its *buddy*, in another failure domain.

The copy for step s begins when step s is handed out, and has to be complete before the rank counts as synced in s. The
second copy has longer: until the gradient barrier of the step before the next snapshot. So where one rank has passed
the barrier of step s, all hold the snapshot of s. Where one begins the next snapshot, all have both copies of the one
before, and the older one's memory may be written again. No message is needed for that, and whenever ranks or nodes are
lost there is a newest step of which all have, or had, a snapshot.

A recovery can interrupt that: the newest snapshot may have no second copy yet when all resume, and take their first
snapshot of the new generation. Then the one before it must not be written over. Which one that is, the controller says
in `keepstep.protocol.messages.Recover`: it knows from all ranks what they hold.

A buddy's node may have no memory for a second copy. A job that starts ends then. Later it goes on: the rank's snapshots
are on its own node only until another one keeps them (`SecondCopyPlan`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from keepstep.protocol.messages import Membership

NUM_KEPT = 2
"""Snapshots of one rank in one place: the newest, and the one that is written meanwhile."""
START_COPIES = NUM_KEPT + 1
"""Second copies that each rank of a new job has to find memory for: of the first there is no optimizer state yet, and
the next two are written to memory of their own."""
TRIAL_EVERY = 2
"""Steps from one snapshot to the next while it is measured what one costs: the others show what steps are without."""
NUM_TRIALS = 16
"""Steps in which that is measured. Of a new job's first snapshot there is no optimizer state yet, and the next two
touch the memory for the first time, each another part of it. Five more are left, and what they cost is their median: a
trial of five steps in all chose two to four times as many as were needed (benchmarks/results/2026-11-25-snapshots.md).
"""
SHARE = 0.01
"""What snapshots may cost by themselves, of the time of all steps."""


class SnapshotSchedule:
    """When snapshots are due. All ranks count from the step at which they resumed together."""

    def __init__(self, wanted: int | None) -> None:
        """Args:
        wanted: steps from one snapshot to the next; 0: none is taken; None: as few as a shard without replicas
            needs, and as cost `SHARE`.
        """
        self._wanted = wanted
        self._first = 0
        self._every: int | None = 0
        self.known = 0
        """What was agreed in an earlier generation, and can be again; 0: nothing."""
        self._is_on_several_nodes = False

    @property
    def every(self) -> int | None:
        """Steps from one snapshot to the next; 0: none is taken; None: it is being measured."""
        return self._every

    def resumed(self, step: int, membership: Membership | None) -> None:
        """All ranks stand at this step, and go on from there: a replacement has no snapshot of its own yet.

        Args:
            step: the step.
            membership: of the generation.
        """
        self._first = step
        self._every = self._wanted
        if self._wanted is None and not (membership and lone_shards(membership)):
            self._every = 0
        is_on_several_nodes = membership is not None and len(membership.nodes) > 1
        if is_on_several_nodes is not self._is_on_several_nodes:  # a second copy is a cost of its own
            self._is_on_several_nodes, self.known = is_on_several_nodes, 0

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this step is to be taken, or held already."""
        if self._every == 0:
            return False
        return (step - self._first) % (self._every or TRIAL_EVERY) == 0

    def is_second_copy_due(self, step: int) -> bool:
        """Whether a rank may pass the gradient barrier of ``step`` only when its buddy has all of its newest snapshot.

        So it is in the first step of a generation, too: with it every rank has its two copies again.
        """
        return self._every != 0 and (step == self._first or self.is_due(step + 1))

    def is_agreed_in(self, step: int) -> bool:
        """Whether the ranks may agree in this step's gradient barrier how often snapshots are taken from then on.

        In the first step they do if one of them knows what was agreed before; a replacement does not know it.
        """
        return self._every is None and step in (self._first, self._first + NUM_TRIALS - 1)

    def is_first(self, step: int) -> bool:
        """Whether it is the step at which all resumed."""
        return step == self._first

    def agreed(self, every: int) -> None:
        """They have: none takes them more often than the one that asked for the fewest."""
        self._every = self.known = every


def lone_shards(membership: Membership) -> frozenset[str]:
    """The shards whose holders all fail together.

    They are in one failure domain; in a job of one domain, on one node; in a job of one node, one rank holds the shard.
    """
    if len(membership.nodes) == 1:
        counts = Counter(membership.shard_numbers)
        return frozenset(membership.shards[number] for number, count in counts.items() if count == 1)
    places = [domain or node for node, domain in membership.nodes]
    if len(set(places)) == 1:
        places = [node for node, _domain in membership.nodes]
    at: defaultdict[int, set[str]] = defaultdict(set)
    for shard, node in set(zip(membership.shard_numbers, membership.node_numbers, strict=True)):
        at[shard].add(places[node])
    return frozenset(membership.shards[number] for number, there in at.items() if len(there) == 1)


def buddies(membership: Membership, refused: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """For each rank whose shard is lone the rank that keeps a second copy of its snapshots: empty on a single node.

    The nodes stand in a ring, those of one failure domain side by side, and each has its copies as many nodes further
    as the largest domain has: so no buddy is in the same domain, unless one has more than half of all nodes.

    Args:
        membership: of the generation.
        refused: by rank how many buddies had no room for it. Each time it is the turn of the next node in the ring, and
            after the last one of the first again.
    """
    lone = lone_shards(membership) if len(membership.nodes) > 1 else ()
    if not lone:
        return {}
    on_node: list[list[int]] = [[] for _ in membership.nodes]
    for rank, node in enumerate(membership.node_numbers):
        on_node[node].append(rank)
    domains = [domain or name for name, domain in membership.nodes]
    ring = sorted(range(len(domains)), key=lambda node: (domains[node], membership.nodes[node]))
    shift = min(max(Counter(domains).values()), len(ring) // 2)
    found = {}
    for position, node in enumerate(ring):
        for index, rank in enumerate(on_node[node]):
            if membership.shard(rank) in lone:
                further = 1 + (shift - 1 + refused.get(rank, 0)) % (len(ring) - 1)
                there = on_node[ring[(position + further) % len(ring)]]
                found[rank] = there[index % len(there)]
    return found


class SecondCopyPlan:
    """Which rank keeps whose second copies: in each generation `buddies`, and other ones where a node has no room.

    A rank whose buddy has no room says so in the gradient barrier in which all second copies are due. In each such
    barrier all ranks hear one rank, that of the greatest number, and from the next snapshot on it has another buddy.
    Those that were not heard ask their buddy again with each snapshot, as do those that no node has room for.
    """

    def __init__(self) -> None:
        self.buddies: dict[int, int] = {}
        """Of all ranks that have one."""
        self._rank = -1
        self._membership: Membership | None = None
        self._generation = 0
        self._num_doubled = 0
        """Second copies of this process's snapshots that a buddy had room for; no more than `START_COPIES` count."""
        self._refused: dict[int, int] = {}
        """By rank how many times it was heard in this generation."""
        self.lacks_room = False
        """This rank's buddy had no room for its newest snapshot."""

    def resumed(self, rank: int, membership: Membership | None, generation: int) -> None:
        """All ranks stand at one step, and no one was refused yet.

        Args:
            rank: this one.
            membership: of the generation; None where no snapshots are taken.
            generation: its number.
        """
        self._rank, self._membership, self._generation = rank, membership, generation
        self._refused, self.lacks_room = {}, False
        self.buddies = buddies(membership) if membership is not None else {}

    @property
    def buddy(self) -> int | None:
        """The rank that keeps this one's."""
        return self.buddies.get(self._rank)

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose buddy this one is."""
        return tuple(sorted(ward for ward, buddy in self.buddies.items() if buddy == self._rank))

    def doubled(self) -> None:
        """The buddy has all of this rank's newest snapshot."""
        self._num_doubled = min(START_COPIES, self._num_doubled + 1)
        self.lacks_room = False

    def refused(self) -> bool:
        """The buddy's node has no room for it.

        Returns:
            whether the job goes on without it. If not it has just begun, and does not have the memory that it needs.
        """
        self.lacks_room = True
        return self._generation > 1 or self._num_doubled == START_COPIES

    def contribution(self) -> int:
        """This rank's number in a gradient barrier in which second copies are due; the maximum is that of one rank."""
        return self._rank + 1 if self.lacks_room else 0

    def reduced(self, number: int) -> bool:
        """The greatest that any rank has said.

        Returns:
            whether a rank has another buddy from the next snapshot on.
        """
        if number == 0 or self._membership is None:
            return False
        self._refused[number - 1] = self._refused.get(number - 1, 0) + 1
        self.buddies = buddies(self._membership, self._refused)
        return True


def fewest_steps(cost_s: float, step_s: float) -> int:
    """How many steps must lie between two snapshots, so that they cost no more than `SHARE` of the time.

    Args:
        cost_s: by how much a snapshot makes a step longer.
        step_s: how long a step takes.
    """
    return max(1, math.ceil(cost_s / (SHARE * step_s)))


def slot_to_replace(held: Mapping[int, tuple[int, int]], rank: int, kept_step: int | None) -> int | None:
    """Which memory a new snapshot of a rank is written to; None: memory that holds nothing.

    Args:
        held: the rank and step of each whole snapshot, by the number of its slot.
        rank: whose snapshot is to be written; it is newer than all of this rank that are held.
        kept_step: of the snapshot that is not written over, however old it is.
    """
    own = {slot: step for slot, (whose, step) in held.items() if whose == rank}
    if len(own) < NUM_KEPT:
        return None
    return min((slot for slot in own if own[slot] != kept_step), key=own.__getitem__)


def outdated(held: Mapping[int, tuple[int, int]], step: int) -> list[int]:
    """The slots whose snapshots count no more when all ranks resume at ``step``: later steps will be computed again."""
    return [slot for slot, (_rank, of_step) in held.items() if of_step > step]
