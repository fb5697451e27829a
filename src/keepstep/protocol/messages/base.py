"""Common parts of all messages."""

from __future__ import annotations

import enum
import sys
from typing import Annotated, TypeAlias

import msgspec

from keepstep.protocol.phases import Phase

Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A time or a duration in seconds. It must be finite, because the journal is JSON: JSON has no infinities or NaN, and a
restarted controller could not read them."""


class Cause(enum.StrEnum):
    """The cause of a recovery, or of the suspicion that leads to one."""

    DIED = "process died"
    """The agent does not know the exit status yet; see `WorkerEnded`."""
    EXIT = "exit"
    SIGNAL = "signal"
    EXCEPTION = "exception"
    HANG = "hang"
    STOPPED = "stopped process"
    COLLECTIVE = "collective failed"
    STUCK = "stuck collective"
    NODE = "node lost"
    CONTROLLER = "controller restarted"
    MOVED = "rank moved"
    DRAIN = "drain"
    DEVICE = "device failed"
    STATE = "state differs"
    APART = "replicas differ"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """Base class of all messages."""


class Tag(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """(generation, step, phase) of one rank, as its tag page shows it."""

    generation: int
    step: int
    phase: Phase


FirstPhases: TypeAlias = tuple[tuple[Phase, Seconds], ...]
"""(phase, duration) pairs, ascending: the longest first phase of each kind that a process of the job has had. It may
include compilation, lazy initialisation and the first batch. See `keepstep.protocol.node.liveness`."""
