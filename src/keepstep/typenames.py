"""Recognises classes by their names, because importing them is slow and often unnecessary."""

from __future__ import annotations


def is_named(thing: object, name: str) -> bool:
    """Whether an object's class, or one of its base classes, has this name."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)
