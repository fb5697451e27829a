"""Maps times to positions, to scale. Long stretches without a change may be cut out, and the picture marks the cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

_STEPS = (1, 2, 5)
MIN_TICK = 68.0
"""Minimum distance of two labels of the axis, in pixels."""
CUT_SHARE = 0.12
"""The part of a cut stretch that remains, as a share of the time outside of all cut stretches."""
LONG = 1.0
"""A stretch is cut if it is longer than the rest times this."""
MAX_CUTS = 4
LEAST_SHARE = 1e-6
"""Minimum share of the whole time that must remain outside of cut stretches."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    begin_s: float
    end_s: float
    left: float
    right: float


class Timescale:
    """Maps times to x positions between two edges."""

    def __init__(self, begin_s: float, end_s: float, left: float, right: float, marks: Iterable[float] = ()) -> None:
        """Args:
        begin_s: the time at the left edge.
        end_s: the time at the right edge; later than ``begin_s``.
        left: position of the left edge, in pixels.
        right: position of the right edge, in pixels.
        marks: times of changes. Long stretches without a mark are cut. Without any marks, nothing is cut.
        """
        self._cuts = _cuts(begin_s, end_s, marks)
        shown_s = end_s - begin_s - sum(until - since for since, until in self._cuts)
        self.per_s = (right - left) / shown_s
        """Pixels per second."""
        self._pieces: list[_Piece] = []
        at_s, x = begin_s, left
        for since_s, until_s in [*self._cuts, (end_s, end_s)]:
            next_x = x + (since_s - at_s) * self.per_s
            self._pieces.append(_Piece(at_s, since_s, x, next_x))
            at_s, x = until_s, next_x

    def at(self, time_s: float) -> float:
        """Returns the position of a time. A time outside of the edges is at the edge."""
        for piece in self._pieces:
            if time_s <= piece.end_s:
                return piece.left + max(0.0, time_s - piece.begin_s) * self.per_s
        return self._pieces[-1].right

    @property
    def cuts(self) -> list[tuple[float, float]]:
        """(position, missing seconds) of each cut."""
        pairs = zip(self._pieces, self._cuts, strict=False)
        return [(piece.right, until_s - since_s) for piece, (since_s, until_s) in pairs]

    def ticks(self, zero_s: float) -> list[tuple[float, str]]:
        """Returns (position, label) of the axis' ticks. Labels count from ``zero_s``, in milliseconds or seconds."""
        step_s = _tick_s(MIN_TICK / self.per_s)
        found: list[tuple[float, str]] = []
        for piece in self._pieces:
            number = math.floor((piece.begin_s - zero_s) / step_s)
            slack_s = 0.01 / self.per_s  # include a tick exactly at the edge
            while (time_s := zero_s + number * step_s) <= piece.end_s + slack_s:
                x = piece.left + (time_s - piece.begin_s) * self.per_s
                if time_s >= piece.begin_s - slack_s and (not found or x - found[-1][0] >= MIN_TICK * 0.9):
                    found.append((x, _tick_text(number, step_s)))
                number += 1
        return found


def duration_text(duration_s: float) -> str:
    """Formats a duration in milliseconds, seconds, minutes or hours."""
    for unit_s, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if abs(duration_s) >= (unit_s if unit_s == 1.0 else 2 * unit_s):
            return f"{_number(duration_s / unit_s)} {unit}"
    return f"{_number(duration_s * 1000)} ms" if duration_s else "0"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return _without_zeros(f"{value:,.{digits}f}")


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tick_text(number: int, step_s: float) -> str:
    """Returns the label of a tick, with enough digits to distinguish it from its neighbours."""
    if number == 0:
        return "0"
    size, unit = (1000.0, "ms") if step_s < 0.999 and abs(number * step_s) < 10 else (1.0, "s")
    digits = max(0, math.ceil(-math.log10(step_s * size) - 1e-9))
    return f"{_without_zeros(f'{number * step_s * size:,.{digits}f}')} {unit}"


def _tick_s(least_s: float) -> float:
    unit_s = 1e-6
    while True:
        for factor in _STEPS:
            if unit_s * factor >= least_s:
                return unit_s * factor
        unit_s *= 10


def _cuts(begin_s: float, end_s: float, marks: Iterable[float]) -> list[tuple[float, float]]:
    """Returns the stretches to cut out, sorted by time."""
    inside = sorted({begin_s, end_s, *(mark for mark in marks if begin_s < mark < end_s)})
    if len(inside) == 2:
        return []
    gaps = sorted(((until - since, since, until) for since, until in itertools.pairwise(inside)), reverse=True)
    long: list[tuple[float, float, float]] = []
    rest_s = end_s - begin_s
    for gap in gaps[:MAX_CUTS]:
        # Stop if the remaining time would be too short.
        if gap[0] <= LONG * (rest_s - gap[0]) or rest_s - gap[0] < LEAST_SHARE * (end_s - begin_s):
            break
        rest_s -= gap[0]
        long.append(gap)
    kept_s = CUT_SHARE * rest_s
    # Keep more time before the cut than after it, so that the start of a box is visible.
    return sorted(
        (since + kept_s * 0.6, until - kept_s * 0.4) for length, since, until in long if length > kept_s * 1.5
    )
