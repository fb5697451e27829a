"""Decides when an agent reports to its controller that ranks of its node make no progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from keepstep.protocol.waiting.operations import Standing

BEFORE = 1 / 3
"""When one rank has stood still for the whole time, the agent tells of those that have for a third of it as well."""
READ_SHARE = 1 / 6
"""While ranks stand still, the agent reads the counts on their pages in intervals of this share of that time."""
REPEAT_S = 300.0
"""What does not change is told again after so long, so that the end of a log shows it."""


class StandingWatch:
    """Of one node: remembers what was told, and says what to tell next."""

    def __init__(self, explain_s: float) -> None:
        """Takes how long a rank stands still before that is told."""
        self._explain_s = explain_s
        self._told: tuple[Standing, ...] = ()
        self._told_s = 0.0
        self._read_s = float("-inf")

    def is_due(self, still_s: Mapping[int, float], now_s: float) -> bool:
        """Whether the pages of the ranks must be read.

        Args:
            still_s: for how long each worker with a rank has stood still.
            now_s: the time.
        """
        if max(still_s.values(), default=0.0) >= self._explain_s:
            return now_s - self._read_s >= self._explain_s * READ_SHARE
        return any(still_s.get(each.worker, 0.0) < now_s - self._told_s for each in self._told)  # it has moved since

    def least_s(self, longest_s: float, *, is_stalled: bool) -> float:
        """How long a rank must have stood still to be told of.

        Args:
            longest_s: how long the rank that has stood still for longest has.
            is_stalled: all ranks of the node wait past their deadlines, and all are told of.
        """
        if is_stalled:
            return 0.0
        return self._explain_s * BEFORE if longest_s >= self._explain_s else math.inf

    def news(self, standing: Iterable[Standing], now_s: float) -> tuple[Standing, ...] | None:
        """What was found in the pages; returns what is to be told, or None where that has been.

        Args:
            standing: the ranks that have stood still for `least_s`.
            now_s: the time.
        """
        self._read_s = now_s
        found = tuple(standing)
        picture = tuple(msgspec.structs.replace(each, still_s=0.0) for each in found)
        if picture == self._told and not (picture and now_s - self._told_s >= REPEAT_S):
            return None
        self._told, self._told_s = picture, now_s
        return found
