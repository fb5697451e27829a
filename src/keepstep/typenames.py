"""Recognises classes by their names, because importing them is slow and often unnecessary."""

from __future__ import annotations

import functools
from typing import Any


def is_named(thing: object, name: str) -> bool:
    """Whether an object's class, or one of its base classes, has this name."""
    kind: Any = type(thing)
    return name in _names(kind)


@functools.lru_cache(maxsize=1024)
def _names(kind: type[Any]) -> frozenset[str]:
    return frozenset(each.__name__ for each in kind.__mro__)
