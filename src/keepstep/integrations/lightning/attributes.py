"""Attributes in which a user's module and callbacks keep values between hooks, such as a list of validation outputs.

Numbers and strings that training has changed are part of the rank's rank-local values, so a replacement gets them.
Containers such as lists and dicts can grow to any size, so keepstep does not send them: on a replacement they have
the content that the script gave them.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from keepstep.worker.values.own_attributes import OwnAttributes

_NOT_THE_USERS = frozenset(vars(LightningModule()))
"""Attributes that every module has: torch's and Lightning's."""


def own_attributes(trainer: Trainer) -> OwnAttributes:
    """The attributes of a trainer's module and of its `bare_callbacks`, before its first step."""
    owners: list[object] = [trainer.lightning_module, *bare_callbacks(trainer)]
    return OwnAttributes(owners, [_NOT_THE_USERS] * len(owners))


def bare_callbacks(trainer: Trainer) -> list[Callback]:
    """The user's callbacks that have no ``state_dict()`` of their own."""
    return [each for each in trainer.callbacks if _is_bare(each)]


def _is_bare(callback: Callback) -> bool:
    is_own = type(callback).__module__.startswith("lightning.")
    return not is_own and not is_overridden("state_dict", callback, parent=Callback)
