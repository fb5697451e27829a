"""Attributes in which a user's callbacks, modules or trainers keep values between a framework's hooks.

No ``state_dict()`` contains them. When keepstep repeats a unit it restores their values from the unit's beginning, so
that a count counts each step once, and a list gets each value once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

NUMBERS: frozenset[type] = frozenset({bool, int, float, str, type(None)})
CONSTANTS: frozenset[type] = NUMBERS | {bytes, tuple, np.bool_, np.int32, np.int64, np.float32, np.float64}
CONTAINERS: frozenset[type] = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_MAX_DEPTH = 8
"""Containers in containers are restored down to this depth."""


class OwnAttributes:
    """The attributes of several objects."""

    def __init__(self, owners: Sequence[object], left_out: Sequence[Collection[str]]) -> None:
        """Args:
        owners: the objects, before the first step.
        left_out: for each object, names of attributes that are not the user's.
        """
        self.owners = owners
        self._left_out = left_out
        self._first = self.of(NUMBERS)
        self._constants = self._first
        self._contents: list[dict[str, Callable[[], Any]]] = []
        self.take()

    def of(self, kinds: frozenset[type]) -> list[dict[str, Any]]:
        """For each owner, its attributes of some types, by name."""
        return [
            {name: value for name, value in vars(owner).items() if type(value) in kinds and name not in left_out}
            for owner, left_out in zip(self.owners, self._left_out, strict=True)
        ]

    def changed(self) -> list[dict[str, Any]]:
        """For each owner, the numbers and strings that differ from those before the training, by name."""
        return [
            {name: value for name, value in named.items() if name not in first or first[name] != value}
            for named, first in zip(self.of(NUMBERS), self._first, strict=True)
        ]

    def put_changed(self, values: Sequence[dict[str, Any]]) -> None:
        """Sets values by name for each owner. A container that is there gets the content of the new one."""
        for owner, named in zip(self.owners, values, strict=True):
            for name, value in named.items():
                present = vars(owner).get(name)
                alike = deque | list if type(value) is list else type(value)
                if type(present) in CONTAINERS and isinstance(present, alike):
                    _fill(present, value)
                else:
                    vars(owner)[name] = value

    def take(self) -> None:
        """Saves all values."""
        self._constants = self.of(CONSTANTS)
        self._contents = [
            {name: _content_of(container, _MAX_DEPTH) for name, container in named.items()}
            for named in self.of(CONTAINERS)
        ]

    def put_back(self) -> None:
        """Restores the values of `take`. Containers are restored in place, with the same objects in them."""
        present = self.of(CONSTANTS | CONTAINERS)
        for owner, named, constants, contents in zip(
            self.owners, present, self._constants, self._contents, strict=True
        ):
            values = vars(owner)
            for name in set(named) - {*constants, *contents}:
                del values[name]
            values.update(constants | {name: put() for name, put in contents.items()})


def _content_of(container: Any, depth: int) -> Callable[[], Any]:
    """A function that gives a container the content that it has now, and returns it."""
    content = list(container.items() if isinstance(container, dict) else container)
    inner = {}
    if not isinstance(container, set) and depth:
        values = container.values() if isinstance(container, dict) else container
        inner = {index: _content_of(each, depth - 1) for index, each in enumerate(values) if type(each) in CONTAINERS}

    def put() -> Any:
        for each in inner.values():
            each()
        _fill(container, content)
        return container

    return put


def _fill(container: Any, content: Any) -> None:
    """Replaces the content of a container."""
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    elif isinstance(container, dict):
        for name, value in content.items() if isinstance(content, dict) else content:
            container[name] = value
    else:
        container.update(content)
