"""The members of the job in one generation."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

from keepstep.errors import RemoteProtocolError

_Name = TypeVar("_Name", bound=Hashable)


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's place in the job."""

    worker: int
    """The number of the process that holds the rank."""
    node: str
    shard: str
    """What the rank holds; ranks of equal shards are replicas of each other."""
    domain: str = ""
    """The node's failure domain: a rack, a switch. Empty: the node alone."""


class MembershipChange(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The difference between two memberships: the ranks whose member has changed."""

    members: tuple[tuple[int, Member], ...]
    """Rank and member."""


class Membership(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """One immutable value per generation: the member at each rank. A job that shrinks or grows has another one.

    Nodes and shards are written once, and by rank their numbers: for 16,384 replicas on 2,048 nodes that makes 130 KiB
    of a message instead of 510.
    """

    workers: tuple[int, ...]
    """By rank."""
    nodes: tuple[tuple[str, str], ...]
    """The name and the failure domain of each."""
    node_numbers: tuple[int, ...]
    """By rank: which of ``nodes``."""
    shards: tuple[str, ...]
    shard_numbers: tuple[int, ...]
    """By rank: which of ``shards``."""

    def __post_init__(self) -> None:
        for numbers, names in ((self.node_numbers, self.nodes), (self.shard_numbers, self.shards)):
            if len(numbers) != len(self.workers) or not all(0 <= number < len(names) for number in set(numbers)):
                raise ValueError(f"a membership of {len(self.workers)} ranks with {len(numbers)} places")

    @classmethod
    def of(cls, members: Iterable[Member]) -> Membership:
        """The membership of these members, in the order of their ranks."""
        listed = tuple(members)
        places = [(member.node, member.domain) for member in listed]
        nodes = {place: number for number, place in enumerate(dict.fromkeys(places))}
        shards = {name: number for number, name in enumerate(dict.fromkeys(member.shard for member in listed))}
        return cls(
            tuple(member.worker for member in listed),
            tuple(nodes),
            tuple(map(nodes.__getitem__, places)),
            tuple(shards),
            tuple(shards[member.shard] for member in listed),
        )

    def changed(self, change: MembershipChange) -> Membership:
        """The membership that follows from a change, which is the same value as one made of all its members.

        Raises:
            RemoteProtocolError: it names a rank that there is not.
        """
        members = dict(change.members)
        if not all(0 <= rank < self.world_size for rank in members):
            raise RemoteProtocolError(f"a change of ranks {sorted(members)} in a membership of {self.world_size} ranks")
        workers, node_numbers, shard_numbers = map(list, (self.workers, self.node_numbers, self.shard_numbers))
        nodes = {place: number for number, place in enumerate(self.nodes)}
        shards = {name: number for number, name in enumerate(self.shards)}
        for rank, member in members.items():
            workers[rank] = member.worker
            node_numbers[rank] = nodes.setdefault((member.node, member.domain), len(nodes))
            shard_numbers[rank] = shards.setdefault(member.shard, len(shards))
        return Membership(tuple(workers), *_in_order(nodes, node_numbers), *_in_order(shards, shard_numbers))

    def change_to(self, after: Membership) -> MembershipChange:
        """What makes this membership the other one, of as many ranks. A worker is always on the same node."""
        return MembershipChange(tuple((rank, after.member(rank)) for rank in self.replaced(after)))

    def replaced(self, after: Membership) -> list[int]:
        """The ranks that another worker holds in the other membership, of as many ranks."""
        pairs = enumerate(zip(self.workers, after.workers, strict=True))
        return [rank for rank, (was, now) in pairs if was != now]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def member(self, rank: int) -> Member:
        """The worker, node and shard of a rank."""
        node, domain = self.nodes[self.node_numbers[rank]]
        return Member(self.workers[rank], node, self.shard(rank), domain)

    def shard(self, rank: int) -> str:
        """What a rank holds."""
        return self.shards[self.shard_numbers[rank]]

    @functools.cached_property
    def replicas(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each shard, ascending. Plain DDP: one shard, all ranks are one replica group."""
        found: dict[str, list[int]] = {shard: [] for shard in self.shards}
        for rank, number in enumerate(self.shard_numbers):
            found[self.shards[number]].append(rank)
        return {shard: tuple(ranks) for shard, ranks in found.items()}

    def is_first_replica(self, rank: int) -> bool:
        """Whether a rank is the first of its replica group, which acts for it, for example to save."""
        return self.replicas[self.shard(rank)][0] == rank


def _in_order(names: Iterable[_Name], numbers: Sequence[int]) -> tuple[tuple[_Name, ...], tuple[int, ...]]:
    """The names that occur, in the order in which they do, and their numbers by rank; as `Membership.of` has them."""
    names, order = tuple(names), list(dict.fromkeys(numbers))
    if order == list(range(len(names))):
        return names, tuple(numbers)
    renumbered = {number: new for new, number in enumerate(order)}
    return tuple(names[number] for number in order), tuple(map(renumbered.__getitem__, numbers))
