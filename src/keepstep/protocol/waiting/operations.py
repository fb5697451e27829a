"""The operations of process groups by their names in `torch.distributed`, and how many of each a rank has begun.

Ranks run the same program, so all members of a group enter the same collectives in the same order. Where the counts of
two members differ, one is behind, or the two have taken different ways through the script.
"""

from __future__ import annotations

import enum

import msgspec


class Operation(enum.StrEnum):
    """What a process group was asked to do."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    BARRIER = "barrier"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"


ALL_MEMBERS = -1
"""The peer of a collective."""
ANY_MEMBER = -2
"""The peer of a recv that takes a message from any rank."""


class OperationCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many operations of one kind a rank has begun and ended since its groups were connected.

    The collectives of a group are counted together, since their order is what its members share. Sends and receives
    are counted for each peer.
    """

    group: str
    """As the registry names it; a long name is cut, in the same way on every rank."""
    operation: Operation
    """The last one that was begun."""
    peer: int
    """Rank in the group of the other side of a send or recv, or `ANY_MEMBER`; of a collective `ALL_MEMBERS`."""
    entered: int
    left: int
    entered_s: float
    """When the last one was begun, in seconds on the node's monotonic clock."""

    @property
    def in_flight(self) -> bool:
        """Whether one was begun and has not ended."""
        return self.entered > self.left
