"""Whole numbers and digests, checked and made in one way."""

from __future__ import annotations

import hashlib
import operator

from keepstep.errors import ConfigurationError


def digest(purpose: str, *numbers: int) -> bytes:
    """64 bytes that differ for every purpose and sequence of numbers, and are the same on every machine."""
    return hashlib.blake2b(f"keepstep.data {purpose} {[*map(operator.index, numbers)]}".encode()).digest()


def whole(name: str, value: int, least: int | None = None, most: int | None = None) -> int:
    """Check a whole number; numpy's count, floats do not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, not {value!r}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be {allowed}, not {number}")
    return number
