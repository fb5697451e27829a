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
    """The shard that the rank holds. Ranks with the same shard are replicas of each other."""
    domain: str = ""
    """The node's failure domain, for example a rack or a switch. Empty: the node is a domain of its own."""


class MembershipChange(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The difference between two memberships: the ranks whose member has changed."""

    members: tuple[tuple[int, Member], ...]
    """Rank and member."""


class Membership(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The member at each rank: one immutable value per generation.

    The names of nodes and shards are stored once, and each rank refers to them by index. For 16,384 replicas on 2,048
    nodes, a message then has 130 KiB instead of 510.
    """

    workers: tuple[int, ...]
    """The worker of each rank."""
    nodes: tuple[tuple[str, str], ...]
    """(name, failure domain) of each node."""
    node_numbers: tuple[int, ...]
    """The index in ``nodes`` of each rank's node."""
    shards: tuple[str, ...]
    shard_numbers: tuple[int, ...]
    """The index in ``shards`` of each rank's shard."""

    def __post_init__(self) -> None:
        for numbers, names in ((self.node_numbers, self.nodes), (self.shard_numbers, self.shards)):
            if len(numbers) != len(self.workers) or not all(0 <= number < len(names) for number in set(numbers)):
                raise ValueError(f"a membership of {len(self.workers)} ranks with {len(numbers)} places")

    @classmethod
    def of(cls, members: Iterable[Member]) -> Membership:
        """Returns the membership of these members, which must be in the order of their ranks."""
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
        """Returns the membership after a change. It equals the membership that `of` makes of all members.

        Raises:
            RemoteProtocolError: the change names a rank that does not exist.
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
        """Returns the change from this membership to ``after``, which must have the same world size.

        It compares workers only, because a worker never changes its node.
        """
        return MembershipChange(tuple((rank, after.member(rank)) for rank in self.replaced(after)))

    def replaced(self, after: Membership) -> list[int]:
        """Returns the ranks that another worker holds in ``after``, which must have the same world size."""
        pairs = enumerate(zip(self.workers, after.workers, strict=True))
        return [rank for rank, (was, now) in pairs if was != now]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def member(self, rank: int) -> Member:
        """Returns the member at a rank."""
        node, domain = self.nodes[self.node_numbers[rank]]
        return Member(self.workers[rank], node, self.shard(rank), domain)

    def shard(self, rank: int) -> str:
        """Returns the shard of a rank."""
        return self.shards[self.shard_numbers[rank]]

    @functools.cached_property
    def replicas(self) -> dict[str, tuple[int, ...]]:
        """Shard -> the ranks that hold it, ascending. With plain DDP there is one shard, and all ranks are replicas."""
        found: dict[str, list[int]] = {shard: [] for shard in self.shards}
        for rank, number in enumerate(self.shard_numbers):
            found[self.shards[number]].append(rank)
        return {shard: tuple(ranks) for shard, ranks in found.items()}

    def is_first_replica(self, rank: int) -> bool:
        """Whether a rank is the first of its replica group. It acts for the group, for example to save."""
        return self.replicas[self.shard(rank)][0] == rank


def _in_order(names: Iterable[_Name], numbers: Sequence[int]) -> tuple[tuple[_Name, ...], tuple[int, ...]]:
    """Drops unused names and orders the rest by their first rank, as `Membership.of` does.

    Returns:
        the names, and the index of each rank's name.
    """
    names, order = tuple(names), list(dict.fromkeys(numbers))
    if order == list(range(len(names))):
        return names, tuple(numbers)
    renumbered = {number: new for new, number in enumerate(order)}
    return tuple(names[number] for number in order), tuple(map(renumbered.__getitem__, numbers))
