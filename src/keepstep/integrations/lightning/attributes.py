"""Attributes in which a user's module and callbacks keep values between hooks, such as a list of validation outputs.

They are no part of any ``state_dict()``. Where a unit comes again they are what they were at its beginning, so that a
list has each value once. Numbers and strings that training has changed go to the other ranks with the rest of what a
rank has for itself, and come back on its replacement. Lists, dicts and the like may grow to any size, and do not: on a
replacement they are what the script made them.
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
    """Those of a training's module, and of its `bare_callbacks`."""

    def __init__(self, trainer: Trainer) -> None:
        """Args:
        trainer: whose; it stands before its first step.
        """
        self._owners: list[object] = [trainer.lightning_module, *bare_callbacks(trainer)]
        self._first = [_of(owner, _NUMBERS) for owner in self._owners]
        self._numbers = self._containers = self._contents = self._first
        self.take()

    def changed(self) -> list[dict[str, Any]]:
        """The numbers and strings that are not as they were before the training, by their names, for each owner."""
        return [
            {name: value for name, value in _of(owner, _NUMBERS).items() if name not in first or first[name] != value}
            for owner, first in zip(self._owners, self._first, strict=True)
        ]

    def put_changed(self, values: Sequence[dict[str, Any]]) -> None:
        """Sets what `changed` has given in another process."""
        for owner, named in zip(self._owners, values, strict=True):
            vars(owner).update(named)

    def take(self) -> None:
        """Remembers all of them."""
        self._numbers = [_of(owner, _NUMBERS) for owner in self._owners]
        self._containers = [_of(owner, _CONTAINERS) for owner in self._owners]
        self._contents = [{name: copy.copy(each) for name, each in named.items()} for named in self._containers]

    def put_back(self) -> None:
        """Makes them what they were at `take`: containers in place, with the objects that were in them."""
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
    """Callbacks that are not Lightning's and do not say by ``state_dict()`` what they keep."""
    return [each for each in trainer.callbacks if _is_bare(each)]


def _is_bare(callback: Callback) -> bool:
    is_own = type(callback).__module__.startswith("lightning.")
    return not is_own and not is_overridden("state_dict", callback, parent=Callback)
