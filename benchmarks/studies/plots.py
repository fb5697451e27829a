"""Draws the plots of a study. matplotlib is optional, and imported only when needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#d55e00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which most colour-blind readers can tell apart, without its yellow: it is too light."""

INK, QUIET, RULE = "#1f2328", "#59636e", "#d0d7de"
LABEL_GAP = 0.055
"""Distance between two labels as a share of the height of the axes: a line of text and a little more."""
MAX_TICKS = 9


def line_chart(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    log_y: bool = False,
) -> None:
    """Draws lines over a logarithmic x axis, each with its name at its right end.

    Args:
        path: an .svg or .png file, which is replaced.
        title: the title above the plot.
        x_label: the label below the x axis.
        y_label: the label above the y axis, with its unit.
        series: name of a line -> its points, with ascending x above 0. At most as many lines as `COLOURS`.
        log_y: make the y axis logarithmic, too. Then y must be above 0.

    Raises:
        ConfigurationError: matplotlib is missing, the suffix is another one, or the points cannot be drawn.
    """
    _check(path, series, log_y)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install keepstep[plot]") from error
    # With a random salt and a date, the same points would give a different file each time.
    with matplotlib.rc_context({"font.size": 11, "text.color": INK, "svg.hashsalt": "keepstep"}):
        figure = Figure(figsize=(9.6, 5.4), facecolor="white")
        axes = figure.add_axes((0.07, 0.12, 0.70, 0.72))
        _axes(axes, series, log_y)
        figure.text(0.02, 0.94, title, fontsize=14, fontweight="bold")
        figure.text(0.02, 0.88, y_label, color=QUIET)
        axes.set_xlabel(x_label, color=QUIET, labelpad=8)
        for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=2.2, solid_capstyle="round", label=name)
            axes.plot(*points[-1], "o", color=colour, markersize=6, clip_on=False)
        _labels(axes, series)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _check(path: Path, series: Mapping[str, Sequence[tuple[float, float]]], log_y: bool) -> None:
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigurationError(f"a picture is an .svg or .png file, not {path.name}")
    if not 1 <= len(series) <= len(COLOURS):
        raise ConfigurationError(f"a picture has 1 to {len(COLOURS)} lines, not {len(series)}")
    for name, points in series.items():
        if not points or any(x <= 0 or (log_y and y <= 0) for x, y in points):
            raise ConfigurationError(f"the line {name!r} has no points, or one that a logarithm does not reach")


def _axes(axes: Axes, series: Mapping[str, Sequence[tuple[float, float]]], log_y: bool) -> None:
    axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", length=0, labelcolor=QUIET)
    places = sorted({x for points in series.values() for x, _ in points})
    every = math.ceil((len(places) - 1) / (MAX_TICKS - 1)) or 1
    ticks = places[::-1][::every][::-1]  # the last place always has its tick
    axes.set_xticks(ticks, labels=[f"{x:,g}" if x < 1 else f"{x:,.0f}" for x in ticks])
    axes.minorticks_off()
    axes.margins(x=0.01)


def _labels(axes: Axes, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Puts each name next to the end of its line, as near as the other names allow."""
    axes.autoscale_view()  # otherwise the limits are still those of empty axes
    to_share = axes.transData + axes.transAxes.inverted()
    ends = [(to_share.transform(points[-1]), name) for name, points in series.items()]
    colours = dict(zip(series, COLOURS, strict=False))
    ends.sort(key=lambda end: float(end[0][1]))
    for (place, name), height in zip(ends, _spread([float(place[1]) for place, _ in ends]), strict=True):
        x, y = (float(value) for value in place)
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(x + 0.04, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.9, "shrinkA": 1, "shrinkB": 5},
        )


def _spread(heights: list[float]) -> list[float]:
    """Moves ascending heights apart by at least `LABEL_GAP`, with the least movement for each cluster."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        while len(clusters) > 1 and _top(clusters[-2]) + LABEL_GAP > _bottom(clusters[-1]):
            last = clusters.pop()
            clusters[-1] += last
    return [_bottom(cluster) + LABEL_GAP * place for cluster in clusters for place in range(len(cluster))]


def _bottom(cluster: list[float]) -> float:
    return sum(cluster) / len(cluster) - LABEL_GAP * (len(cluster) - 1) / 2


def _top(cluster: list[float]) -> float:
    return _bottom(cluster) + LABEL_GAP * (len(cluster) - 1)
