"""keepstep: lose a device, keep the step.

The names that a training script needs::

    session = keepstep.init()
    session.protect(model=model, optimizer=optimizer)
    for step in session.steps(1000):
        with step:
            ...

They are loaded at their first use, so that the launcher, which needs no torch, does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.errors import (
    ConfigurationError,
    KeepstepError,
    NothingToRecoverFrom,
    PeerLost,
    StateMismatch,
    UsageError,
)

if TYPE_CHECKING:
    from keepstep.worker.session import Session, init
    from keepstep.worker.steps import Step

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "KeepstepError",
    "NothingToRecoverFrom",
    "PeerLost",
    "Session",
    "StateMismatch",
    "Step",
    "UsageError",
    "init",
]


def __getattr__(name: str) -> object:
    if name in ("Session", "init"):
        from keepstep.worker import session

        return getattr(session, name)
    if name == "Step":
        from keepstep.worker.steps import Step

        return Step
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
