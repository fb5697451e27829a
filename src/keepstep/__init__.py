"""keepstep: lose a device, keep the step.

The names that a training script needs::

    session = keepstep.init()
    session.protect(model=model, optimizer=optimizer)
    for step in session.steps(1000):
        with step:
            ...

The names that a consumer of its weights needs::

    subscriber = keepstep.Subscriber(folder, into=model)

Python imports their modules at first use: the launcher does not need torch and should not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from keepstep.errors import (
    ConfigurationError,
    KeepstepError,
    NothingToRecoverFrom,
    PeerLost,
    StateMismatch,
    StepInterrupted,
    UsageError,
    WeightsNotReady,
)

if TYPE_CHECKING:
    from keepstep.protocol.transfer.names.name_map import NameMap, NameRule
    from keepstep.weights.giving_back import give_back, take_back
    from keepstep.weights.memory.blocks import Block
    from keepstep.weights.memory.mapping.mapped import Mapped
    from keepstep.weights.publisher import Buffers, Publisher
    from keepstep.weights.subscriber import Subscriber
    from keepstep.worker.loop.step import Step
    from keepstep.worker.session import Session, init

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Buffers",
    "ConfigurationError",
    "KeepstepError",
    "Mapped",
    "NameMap",
    "NameRule",
    "NothingToRecoverFrom",
    "PeerLost",
    "Publisher",
    "Session",
    "StateMismatch",
    "Step",
    "StepInterrupted",
    "Subscriber",
    "UsageError",
    "WeightsNotReady",
    "give_back",
    "init",
    "take_back",
]


_MODULES = {
    "Block": "keepstep.weights.memory.blocks",
    "Buffers": "keepstep.weights.publisher",
    "Mapped": "keepstep.weights.memory.mapping.mapped",
    "NameMap": "keepstep.protocol.transfer.names.name_map",
    "NameRule": "keepstep.protocol.transfer.names.name_map",
    "Publisher": "keepstep.weights.publisher",
    "Session": "keepstep.worker.session",
    "Step": "keepstep.worker.loop.step",
    "Subscriber": "keepstep.weights.subscriber",
    "give_back": "keepstep.weights.giving_back",
    "init": "keepstep.worker.session",
    "take_back": "keepstep.weights.giving_back",
}
"""Public name -> its module, for the names that need torch."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
