"""Classifies gloo errors: a broken connection, a timeout, or an invalid call.

Gloo's errors have no types, so their messages are parsed: a connection error begins with a location in gloo's sources.
"""

from __future__ import annotations

from keepstep.worker.backends.communicator import FailureCause

RAISED = (RuntimeError, ValueError, TypeError, IndexError)
"""The types in Python of errors of torch's C++ code."""


def cause_of(error: Exception) -> FailureCause:
    """Returns why an operation has failed, from the text of its error."""
    message = str(error)
    if "Timed out waiting" in message or "Application timeout" in message:
        return FailureCause.DEADLINE
    return FailureCause.CONNECTION if "gloo/transport" in message else FailureCause.CALL
