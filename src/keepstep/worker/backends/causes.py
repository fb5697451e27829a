"""Why an operation of gloo's has failed: a connection, its own deadline, or the call itself.

Gloo's errors have no types, so its words are looked at: an error of a connection begins with a place in gloo's sources.
"""

from __future__ import annotations

import enum

RAISED_BY_GLOO = (RuntimeError, ValueError, TypeError, IndexError)
"""What torch's C++ errors become in Python."""


class Cause(enum.Enum):
    """What an operation has failed for."""

    CONNECTION = enum.auto()
    """A connection ended: the peer is gone, or has left the group."""
    DEADLINE = enum.auto()
    """Its time is over: a peer did not come, whatever the reason. Gloo has closed the connections of the group."""
    CALL = enum.auto()
    """Neither: gloo refuses what it was asked to do, such as a bitwise reduction of floats."""


def cause_of(error: Exception) -> Cause:
    """Tells from its text why an operation has failed."""
    message = str(error)
    if "Timed out waiting" in message or "Application timeout" in message:
        return Cause.DEADLINE
    return Cause.CONNECTION if "gloo/transport" in message else Cause.CALL
