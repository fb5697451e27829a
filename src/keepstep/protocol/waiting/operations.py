"""Operations of process groups by their names in `torch.distributed`, and how many of each a rank has begun.

Ranks run the same program, so all members of a group enter the same collectives in the same order. If the counts of two
members differ, one is behind, or they have taken different branches of the script.
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import msgspec

from keepstep.protocol.phases import Phase


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

    @property
    def in_flight(self) -> bool:
        """Whether one was begun and has not ended."""
        return self.entered > self.left


class WaitsFor(enum.StrEnum):
    """What a rank that stands still waits for."""

    RANKS = "other ranks"
    """It is in a collective, a send or a recv."""
    CONTROLLER = "the controller"
    NOTHING = "nothing"
    """It is in code of its own: it computes, reads, or hangs."""


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank that has stood still for long, and where."""

    worker: int
    step: int
    phase: Phase
    waits_for: WaitsFor
    still_s: Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    """How long it had stood still when this was said. Finite, as all that goes into the journal."""
    counts: tuple[OperationCount, ...]
    """Of its groups and peers, the one used last in front; `MAX_TOLD` of them at most."""


MAX_TOLD = 16
"""Counts of a rank that are told: those of the groups used last, in which it waits, are among them."""
