"""What all messages are made of."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import msgspec

from keepstep.protocol.phases import Phase

Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A time or a duration. Finite: the journal is JSON, which has no other numbers, so one that is not would be written
and never be read again."""


class Cause(enum.StrEnum):
    """Why a recovery was begun."""

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


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, array_like=True):
    """The root of all messages."""


class Tag(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """(generation, step, phase) of one rank, as its tag page shows it."""

    generation: int
    step: int
    phase: Phase
