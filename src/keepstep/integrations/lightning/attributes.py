"""Attributes in which a user's module and callbacks keep values between hooks, such as a list of validation outputs.

No ``state_dict()`` contains them. When keepstep repeats a unit it restores their values from the unit's beginning, so
that a list gets each value once.

Numbers and strings that training has changed are part of the rank's rank-local values, so a replacement gets them.
Containers such as lists and dicts can grow to any size, so keepstep does not send them: on a replacement they have
the content that the script gave them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

_NUMBERS: frozenset[type] = frozenset({bool, int, float, str, type(None)})
_CONTAINERS: frozenset[type] = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
_NOT_THE_USERS = frozenset(vars(LightningModule()))
"""Attributes that every module has: torch's and Lightning's."""


class OwnAttributes:
    """The attributes of a trainer's module and of its `bare_callbacks`."""

    def __init__(self, trainer: Trainer) -> None:
        """Args:
        trainer: the trainer, before its first step.
        """
        self._owners: list[object] = [trainer.lightning_module, *bare_callbacks(trainer)]
        self._first = [_of(owner, _NUMBERS) for owner in self._owners]
        self._numbers = self._containers = self._contents = self._first
        self.take()

    def changed(self) -> list[dict[str, Any]]:
        """For each owner, the numbers and strings that differ from those before the training, by name."""
        return [
            {name: value for name, value in _of(owner, _NUMBERS).items() if name not in first or first[name] != value}
            for owner, first in zip(self._owners, self._first, strict=True)
        ]

    def put_changed(self, values: Sequence[dict[str, Any]]) -> None:
        """Sets the values that `changed` returned in another process."""
        for owner, named in zip(self._owners, values, strict=True):
            vars(owner).update(named)

    def take(self) -> None:
        """Saves all values."""
        self._numbers = [_of(owner, _NUMBERS) for owner in self._owners]
        self._containers = [_of(owner, _CONTAINERS) for owner in self._owners]
        self._contents = [{name: copy.copy(each) for name, each in named.items()} for named in self._containers]

    def put_back(self) -> None:
        """Restores the values of `take`. Containers are restored in place, with the same objects in them."""
        for owner, numbers, containers, contents in zip(
            self._owners, self._numbers, self._containers, self._contents, strict=True
        ):
            values = vars(owner)
            for name in {*_of(owner, _NUMBERS), *_of(owner, _CONTAINERS)} - {*numbers, *containers}:
                del values[name]
            values.update(numbers | containers)
            for name, container in containers.items():
                container.clear()
                put = container.extend if isinstance(container, list | deque) else container.update
                put(contents[name])


def _of(owner: object, kinds: frozenset[type]) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in kinds and name not in _NOT_THE_USERS}


def bare_callbacks(trainer: Trainer) -> list[Callback]:
    """The user's callbacks that have no ``state_dict()`` of their own."""
    return [each for each in trainer.callbacks if _is_bare(each)]


def _is_bare(callback: Callback) -> bool:
    is_own = type(callback).__module__.startswith("lightning.")
    return not is_own and not is_overridden("state_dict", callback, parent=Callback)
