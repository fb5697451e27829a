"""When a rank takes snapshots of its state, where they are kept, and which of them count.

A rank keeps its two newest snapshots in memory of its node. If all holders of a shard would be lost with one node or
failure domain, another rank keeps a second copy of each snapshot: its *buddy*, in another failure domain.

A rank begins the snapshot of step s when step s is yielded, and must complete it before the rank counts as synced in s.
It must complete the second copy before the gradient barrier of the step before the next snapshot. So when one rank has
passed the barrier of step s, all ranks hold the snapshot of s. When one rank begins the next snapshot, all ranks have
both copies of the last one, and may overwrite the older one. This needs no message. Whenever ranks or nodes are lost,
there is a newest step of which all ranks have, or had, a snapshot.

A loop may have steps without an update, from which it cannot go back to an earlier one, as at the end of an epoch. Such
a step s has no snapshot of its own. In it each rank completes both copies of the snapshot of s + 1 before it enters the
gradient barrier, where the state is that of s + 1 already. So when one rank has passed that barrier, all ranks have the
snapshot of s + 1, and no loss takes the job back to s or before. If one is lost earlier, there is the snapshot that all
ranks had before step s, because a rank begins the next one only in s.

A recovery can interrupt that. When all ranks resume and take their first snapshot of the new generation, the newest
snapshot may have no second copy yet. Then no rank may overwrite the snapshot before it. The controller knows which
snapshots all ranks hold, and names the step in `keepstep.protocol.messages.Recover` (``kept_step``).

A buddy's node may have no memory for a second copy. Then the rank's snapshots are on its own node only, and training
continues.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from keepstep.protocol.messages import Membership

NUM_KEPT = 2
"""Number of snapshots of one rank in one place: the newest, and the one that is being written."""
TRIAL_EVERY = 2
"""Steps from one snapshot to the next while their cost is measured. The steps between show the time without one."""
NUM_TRIALS = 16
"""Number of steps in which the cost is measured. The first snapshot of a new job has no optimizer state yet, and the
next two touch their memory for the first time. The cost is the median of the other five. A trial of five steps in all
chose two to four times too many steps between snapshots (benchmarks/results/2026-11-25-snapshots.md)."""
SHARE = 0.01
"""The share of the training time that snapshots may cost if keepstep chooses the interval."""


class SnapshotSchedule:
    """Decides when snapshots are due. All ranks count from the step at which they resumed together."""

    def __init__(self, wanted: int | None) -> None:
        """Args:
        wanted: steps from one snapshot to the next. 0 disables snapshots. None: keepstep takes snapshots only if a
            shard has no replica elsewhere (`lone_shards`), as often as `SHARE` allows.
        """
        self._wanted = wanted
        self._first = 0
        self._every: int | None = 0
        self.known = 0
        """The interval on which the ranks agreed in an earlier generation, and can agree again; 0 if none."""
        self._is_on_several_nodes = False
        self.ahead: Callable[[int], bool] = lambda _step: False
        """Tells of a step whether it makes no update, and each rank takes the snapshot of the next one in it."""

    @property
    def every(self) -> int | None:
        """Steps from one snapshot to the next. 0: snapshots are disabled. None: the ranks still measure the cost."""
        return self._every

    def resumed(self, step: int, membership: Membership | None) -> None:
        """Starts the schedule over at the step at which all ranks resume: a replacement has no snapshot yet.

        Args:
            step: the resume step.
            membership: the membership of the generation.
        """
        self._first = step
        self._every = self._wanted
        if self._wanted is None and not (membership and lone_shards(membership)):
            self._every = 0
        is_on_several_nodes = membership is not None and len(membership.nodes) > 1
        if is_on_several_nodes is not self._is_on_several_nodes:  # second copies change the cost
            self._is_on_several_nodes, self.known = is_on_several_nodes, 0

    def is_due(self, step: int) -> bool:
        """Returns whether each rank must take a snapshot of this step, unless it holds one already."""
        if self._every == 0 or (self.ahead(step) and step != self._first):
            return False
        return (step - self._first) % (self._every or TRIAL_EVERY) == 0

    def is_next_due(self, step: int) -> bool:
        """Returns whether each rank must take the snapshot of ``step + 1`` before the gradient barrier of ``step``."""
        return self._every != 0 and self.ahead(step)

    def is_second_copy_due(self, step: int) -> bool:
        """Returns whether a rank may pass the gradient barrier of ``step`` only once its buddy has its newest snapshot.

        This also holds for the first step of a generation: after it, every rank has two copies again.
        """
        return self._every != 0 and (step == self._first or self.is_due(step + 1) or self.ahead(step + 1))

    def is_agreed_in(self, step: int) -> bool:
        """Returns whether the ranks may agree on the interval of snapshots in this step's gradient barrier.

        In the first step they agree if one of them knows the former interval. A replacement does not know it.
        """
        return self._every is None and step in (self._first, self._first + NUM_TRIALS - 1)

    def is_first(self, step: int) -> bool:
        """Returns whether all ranks resumed at this step."""
        return step == self._first

    def agreed(self, every: int) -> None:
        """Records the interval on which the ranks have agreed: the greatest that any rank asked for."""
        self._every = self.known = every


def lone_shards(membership: Membership) -> frozenset[str]:
    """Returns the shards whose holders would all fail together.

    Their holders are in one failure domain. In a job with one domain, they are on one node. In a job with one node, a
    single rank holds the shard.
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


def buddies(membership: Membership) -> dict[int, int]:
    """Returns the buddy of each rank with a lone shard. Empty on a single node.

    The nodes form a ring in which nodes of one failure domain are neighbours. The buddy of a rank is on the node that
    is as many places further as the largest domain has nodes. So it is in another domain, unless one domain has more
    than half of the nodes.
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
                there = on_node[ring[(position + shift) % len(ring)]]
                found[rank] = there[index % len(there)]
    return found


def buddy_and_wards(membership: Membership, rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the buddy of a rank, None if it has none, and the ranks whose buddy it is, ascending."""
    found = buddies(membership)
    return found.get(rank), tuple(sorted(ward for ward, buddy in found.items() if buddy == rank))


def fewest_steps(cost_s: float, step_s: float) -> int:
    """Returns the least interval of snapshots, in steps, at which they cost no more than `SHARE` of the time.

    Args:
        cost_s: by how much a snapshot prolongs a step, in seconds.
        step_s: duration of a step without one, in seconds.
    """
    return max(1, math.ceil(cost_s / (SHARE * step_s)))


def slot_to_replace(held: Mapping[int, tuple[int, int]], rank: int, kept_step: int | None) -> int | None:
    """Returns the slot that a new snapshot of a rank overwrites; None if the rank may use an empty slot.

    Args:
        held: slot -> (rank, step) of each complete snapshot.
        rank: the rank of the new snapshot, which is newer than all its others.
        kept_step: the step of a snapshot that must not be overwritten, however old it is.
    """
    own = {slot: step for slot, (whose, step) in held.items() if whose == rank}
    if len(own) < NUM_KEPT:
        return None
    return min((slot for slot in own if own[slot] != kept_step), key=own.__getitem__)


def outdated(held: Mapping[int, tuple[int, int]], step: int) -> list[int]:
    """Returns the slots with snapshots of steps after ``step``: invalid when all ranks resume at ``step``."""
    return [slot for slot, (_rank, of_step) in held.items() if of_step > step]
