"""Classes that are recognised by their names: to import them takes long, and a script without them does not have to."""

from __future__ import annotations


def is_named(thing: object, name: str) -> bool:
    """Whether a thing's class, or one that it is derived from, has this name."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)
