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
    """The operations of a process group."""

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
"""Value of ``peer`` for a collective."""
ANY_MEMBER = -2
"""Value of ``peer`` for a recv that accepts a message from any rank."""


class OperationCount(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many operations of one kind a rank has begun and ended since its groups were connected.

    All collectives of a group have one count, because all members enter them in the same order. Sends and receives have
    one count for each peer.
    """

    group: Annotated[str, msgspec.Meta(max_length=256)]
    """The group's name in the registry of groups. A long name is cut, in the same way on every rank."""
    operation: Operation
    """The operation that was begun last."""
    peer: int
    """The other side's rank in the group for a send or recv, or `ANY_MEMBER`; `ALL_MEMBERS` for a collective."""
    entered: int
    left: int

    @property
    def in_flight(self) -> bool:
        """Whether an operation was begun and has not ended."""
        return self.entered > self.left


class WaitsFor(enum.StrEnum):
    """What a rank without progress waits for."""

    RANKS = "other ranks"
    """The rank is in a collective, a send or a recv."""
    CONTROLLER = "the controller"
    SIGNAL = "SIGCONT"
    """SIGSTOP has stopped the process."""
    READER = "a reader"
    """The process sleeps, and nobody reads the output of the job: its terminal or pipe takes no more."""
    NOTHING = "nothing"
    """The rank runs its own code: it computes, reads, or hangs."""


MAX_TOLD = 16
"""Most counts of a rank in a report. They include those of the groups in which it waits, which it used last."""


MAX_DOING = 1000
"""Limit of what is told of a process, in characters."""


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank that has made no progress for long, and its position."""

    worker: int
    step: int
    phase: Phase
    waits_for: WaitsFor
    still_s: Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    """How long it had made no progress at the time of the report, in seconds. Finite, because the journal is JSON."""
    counts: Annotated[tuple[OperationCount, ...], msgspec.Meta(max_length=MAX_TOLD)]
    """The counts of its groups and peers, most recently used first, at most `MAX_TOLD`."""
    doing: Annotated[str, msgspec.Meta(max_length=MAX_DOING)]
    """What the operating system and Python say that its process does, in words for people; empty if they do not tell.
    No decision depends on it."""
