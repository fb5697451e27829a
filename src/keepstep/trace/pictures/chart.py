"""Steps per second over a whole run, with its recoveries."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.trace.pictures.drawing import LabelRow, Line, Picture, Polygon, Rectangle, Shape, Text
from keepstep.trace.pictures.timescale import Timescale

WIDTH, HEIGHT = 1000, 236
LEFT, RIGHT, TOP, BOTTOM = 60, 984, 48, 190
MAX_BARS = 308
"""So many that each is three pixels wide."""


def rate_chart(
    buckets: Sequence[int],
    bucket_s: float,
    duration_s: float,
    lost: Sequence[tuple[float, float]],
    moments: Sequence[float],
) -> Picture:
    """Draws how fast the job went.

    Args:
        buckets: steps completed in each stretch of time since the start.
        bucket_s: how long such a stretch is.
        duration_s: of the run until now.
        lost: stretches of time that recoveries cost, in seconds since the start.
        moments: of the failures, in seconds since the start.
    """
    duration_s = max(duration_s, bucket_s * 0.5, 1e-3)
    rates = _rates(buckets, bucket_s, duration_s)
    highest = max((rate for _, _, rate in rates), default=0.0) or 1.0
    step = _round(highest / 3)
    scale = Timescale(0.0, duration_s, LEFT, RIGHT)
    per_unit = (BOTTOM - TOP) / (highest * 1.08)
    picture = Picture(WIDTH, HEIGHT, f"Steps per second over {duration_s:.0f} seconds; {len(moments)} recoveries.")
    shapes: list[Shape] = [Rectangle(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "panel", 8)]
    level = 0.0
    while level <= highest * 1.05:
        y = BOTTOM - level * per_unit
        shapes += [Line(((LEFT, y), (RIGHT, y)), "tick"), Text(LEFT - 8, y + 4, f"{level:g}", "small", "end")]
        level = round(level + step, 9)
    points = [(scale.at(0.0), float(BOTTOM))]
    for begin_s, end_s, rate in rates:
        y = BOTTOM - rate * per_unit
        points += [(scale.at(begin_s), y), (scale.at(end_s), y)]
    points.append((points[-1][0], float(BOTTOM)))
    shapes += [Polygon(tuple(points), "rate"), Line(((LEFT, BOTTOM), (RIGHT, BOTTOM)), "axis")]
    for begin_s, end_s in lost:
        left = scale.at(begin_s)
        shapes.append(Rectangle(left, TOP, max(scale.at(end_s) - left, 0.8), BOTTOM - TOP, "lost", 0, "a recovery"))
    shapes += _marks(scale, moments)
    row = LabelRow(LEFT - 20, WIDTH - 4)
    for x, label in scale.ticks(0.0):
        shapes.append(Line(((x, BOTTOM), (x, BOTTOM + 4)), "axis"))
        shapes += row.place(Text(x, BOTTOM + 18, label, "small", "middle"))
    shapes += [
        Text(18, 24, "steps per second", "head"),
        Text(RIGHT, HEIGHT - 12, "since the start of the run", "small", "end"),
    ]
    picture.shapes = shapes
    return picture


def _marks(scale: Timescale, moments: Sequence[float]) -> list[Shape]:
    """A flash at each failure, with the number of its recovery where there is room."""
    shapes: list[Shape] = []
    row = LabelRow(LEFT - 10, WIDTH - 4, 3.0)
    for number, at_s in enumerate(moments, 1):
        x = scale.at(at_s)
        bolt = ((1, -9), (-4, 1), (-1, 1), (-3, 9), (4, -2), (1, -2), (4, -9))
        shapes.append(Polygon(tuple((x + dx, TOP - 6 + dy) for dx, dy in bolt), "bolt"))
        shapes += row.place(Text(x, TOP - 18, str(number), "small", "middle"))
    return shapes


def _rates(buckets: Sequence[int], bucket_s: float, duration_s: float) -> list[tuple[float, float, float]]:
    """(begin, end, steps per second) of as many stretches as can be seen."""
    together = max(1, -(-len(buckets) // MAX_BARS))
    rates = []
    for at in range(0, len(buckets), together):
        begin_s = at * bucket_s
        end_s = min((at + together) * bucket_s, duration_s)
        # A last stretch of a moment says nothing of a rate.
        if end_s - begin_s >= 0.2 * together * bucket_s:
            rates.append((begin_s, end_s, sum(buckets[at : at + together]) / (end_s - begin_s)))
    return rates


def _round(value: float) -> float:
    """The next larger one of 1, 2, 5, 10, ..."""
    unit = 1e-6
    while True:
        for factor in (1, 2, 5):
            if unit * factor >= value:
                return unit * factor
        unit *= 10
