"""The controller's machine: from training, through a recovery, back to training."""

from keepstep.protocol.recovery.machine import RecoveryMachine
from keepstep.protocol.recovery.orders import Effect
from keepstep.protocol.recovery.settings import (
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_NOTHING_TO_RECOVER,
    EXIT_TOO_FEW_RANKS,
    GRACE_S,
    RecoverySettings,
)
from keepstep.protocol.recovery.transitions import TRANSITIONS, Stage

__all__ = [
    "EXIT_DRAINED",
    "EXIT_FAILED",
    "EXIT_NOTHING_TO_RECOVER",
    "EXIT_TOO_FEW_RANKS",
    "GRACE_S",
    "TRANSITIONS",
    "Effect",
    "RecoveryMachine",
    "RecoverySettings",
    "Stage",
]
