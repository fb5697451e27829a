"""Decides when an agent reports to its controller that ranks of its node make no progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from keepstep.protocol.waiting.operations import Standing

BEFORE = 1 / 3
"""When one rank has made no progress for ``explain_s``, the agent also reports ranks without progress for this share of
it."""
READ_SHARE = 1 / 6
"""While ranks make no progress, the agent reads the counts on their pages at intervals of this share of
``explain_s``."""
REPEAT_S = 300.0
"""The agent repeats an unchanged report after so long, so that the end of a log shows it."""


class StandingWatch:
    """Decides for one node what to report next, from what it has reported before."""

    def __init__(self, explain_s: float) -> None:
        """Args:
        explain_s: how long a rank makes no progress before the agent reports it, in seconds.
        """
        self._explain_s = explain_s
        self._told: tuple[Standing, ...] = ()
        self._told_s = 0.0
        self._read_s = float("-inf")

    def is_due(self, still_s: Mapping[int, float], now_s: float) -> bool:
        """Returns whether the agent must read the counts on the pages now.

        Args:
            still_s: worker with a rank -> seconds without progress.
            now_s: the present time.
        """
        if max(still_s.values(), default=0.0) >= self._explain_s:
            return now_s - self._read_s >= self._explain_s * READ_SHARE
        return any(still_s.get(each.worker, 0.0) < now_s - self._told_s for each in self._told)  # it has moved since

    def least_s(self, longest_s: float, *, is_stalled: bool) -> float:
        """Returns how long a rank must have made no progress to be in the report, in seconds.

        Args:
            longest_s: the longest time without progress of any rank.
            is_stalled: whether all ranks of the node wait past their deadlines; then the report has all of them.
        """
        if is_stalled:
            return 0.0
        return self._explain_s * BEFORE if longest_s >= self._explain_s else math.inf

    def news(self, standing: Iterable[Standing], now_s: float) -> tuple[Standing, ...] | None:
        """Records what the pages show, and returns the report to send; None if it was sent already.

        Args:
            standing: the ranks without progress for `least_s`.
            now_s: the present time.
        """
        self._read_s = now_s
        found = tuple(standing)
        picture = tuple(msgspec.structs.replace(each, still_s=0.0, doing="") for each in found)
        if picture == self._told and not (picture and now_s - self._told_s >= REPEAT_S):
            return None
        self._told, self._told_s = picture, now_s
        return found
