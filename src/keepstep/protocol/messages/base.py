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

MAX_NAME = 256
"""Limit of a name in a report, in characters: of a node, a failure domain, a shard."""
MAX_TEXT = 4096
"""Limit of another text in a report, in characters. No path on Linux is longer, and `text` cuts errors to fewer."""
MAX_TRACEBACK = 16_000
"""Limit of a traceback in a report, in characters."""
MAX_AGREED_BYTES = 1 << 16
"""Limit of a value on which the processes of a job agree. The journal contains it."""
MAX_DEVICES = 1024
"""Most devices in a list of a node's devices."""
MAX_LISTED = 1 << 16
"""Most entries of another list in a report: workers of a node, or steps that a worker can load."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Traceback = Annotated[str, msgspec.Meta(max_length=MAX_TRACEBACK)]
AgreedValue = Annotated[bytes, msgspec.Meta(max_length=MAX_AGREED_BYTES)]
Devices: TypeAlias = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DEVICES)]
Numbers: TypeAlias = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LISTED)]
"""Workers, ranks or steps. The journal records reports, so the receiver refuses longer texts and lists."""


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


FirstPhases: TypeAlias = Annotated[tuple[tuple[Phase, Seconds], ...], msgspec.Meta(max_length=len(Phase))]
"""(phase, duration) pairs, ascending: the longest first phase of each kind that a process of the job has had. It may
include compilation, lazy initialisation and the first batch. See `keepstep.protocol.node.liveness`."""
