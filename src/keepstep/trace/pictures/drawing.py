"""Pictures as lists of shapes, from back to front, and their output as SVG."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Sequence

from keepstep.trace.pictures.theme import INKS, LOOKS, PATTERN_LINES, PATTERN_OPACITY, PATTERN_SIZE, STYLE

CHARACTER_WIDTH = 0.56
"""Average width of a label's character, relative to the font size, in DejaVu Sans, the widest of the common fonts."""
SLACK_WIDTH = 0.3
"""Extra width for a wide character in a short label, relative to the font size."""
BOLD = 1.12
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text_width(content: str, kind: str) -> float:
    """Estimates the width of a text in pixels. It is an estimate because the viewer's font is not known."""
    ink = INKS[kind]
    width = (CHARACTER_WIDTH * len(content) + SLACK_WIDTH) * ink.size if content else 0.0
    return width * (BOLD if ink.is_bold else 1.0)


def fitting(labels: Sequence[str], kind: str, width: float) -> str:
    """Returns the first label that is not wider than ``width``; an empty string if there is none."""
    return next((label for label in labels if text_width(label, kind) <= width), "")


def shortened(content: str, kind: str, width: float) -> str:
    """Returns a text, truncated with an ellipsis if it is wider than ``width``."""
    if text_width(content, kind) <= width:
        return content
    kept = next((n for n in range(len(content), 0, -1) if text_width(content[:n] + "…", kind) <= width), 0)
    return content[:kept].rstrip() + "…" if kept else ""


def escaped(content: str) -> str:
    """Escapes a text for XML and HTML, including attributes. Characters that XML does not allow become ``?``."""
    return html.escape(_NOT_IN_XML.sub("?", content))


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    radius: float = 4.0
    hint: str = ""
    """Tooltip of the rectangle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line through two points or more."""

    points: tuple[tuple[float, float], ...]
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Polygon:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One line of text. ``anchor`` is the part of it that is at ``x``: start, middle or end."""

    x: float
    y: float
    content: str
    kind: str
    anchor: str = "start"

    @property
    def span(self) -> tuple[float, float]:
        """Estimated left and right edge."""
        width = text_width(self.content, self.kind)
        begin = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return begin, begin + width


Shape = Rectangle | Line | Polygon | Text


@dataclasses.dataclass(slots=True)
class Picture:
    """Shapes, and a description of the picture for screen readers."""

    width: float
    height: float
    what: str
    shapes: list[Shape] = dataclasses.field(default_factory=list)

    def svg(self) -> str:
        """Returns the picture as a standalone SVG file, with light and dark colours."""
        inside = "\n".join([f"<style>\n{STYLE}\n</style>", _patterns(), *map(_shape, self.shapes)])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" class="picture" '
            f'role="img" aria-label="{escaped(self.what)}">\n{inside}\n</svg>\n'
        )


def arrow(points: Sequence[tuple[float, float]], kind: str, head_kind: str, size: float = 9.0) -> list[Shape]:
    """Returns the shapes of an arrow with its tip at the last point."""
    (x0, y0), (x1, y1) = points[-2:]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    dx, dy = (x1 - x0) / length * size, (y1 - y0) / length * size
    tail = (x1 - dx, y1 - dy)
    head = ((x1, y1), (tail[0] - dy * 0.6, tail[1] + dx * 0.6), (tail[0] + dy * 0.6, tail[1] - dx * 0.6))
    return [Line((*points[:-1], tail), kind), Polygon(head, head_kind)]


class LabelRow:
    """A row of texts that do not overlap."""

    def __init__(self, begin: float, end: float, gap: float = 6.0) -> None:
        self._begin, self._end, self._gap = begin, end, gap
        self._taken: list[tuple[float, float]] = []

    def place(self, text: Text) -> list[Shape]:
        """Returns the text, or nothing if there is no room for it."""
        begin, end = text.span
        if not text.content or begin < self._begin or end > self._end:
            return []
        if any(
            begin < other_end + self._gap and end > other_begin - self._gap for other_begin, other_end in self._taken
        ):
            return []
        self._taken.append((begin, end))
        return [text]


def labelled_box(box: Rectangle, labels: Sequence[str], part: tuple[float, float] | None = None) -> list[Shape]:
    """Returns the shapes of a box with the first label that fits into it. Labels may have line breaks.

    Args:
        box: the box.
        labels: the possible labels, the longest first.
        part: left and right limit of the label; None: the whole width.
    """
    look = LOOKS[box.kind]
    shapes: list[Shape] = [box]
    left, right = part if part is not None else (box.x, box.x + box.width)
    room = min(right - left, box.width) - 6
    for label in labels:
        lines = label.split("\n")
        height = INKS[look.ink].size * 1.1
        if len(lines) * height > box.height - 2 or any(text_width(line, look.ink) > room for line in lines):
            continue
        first = box.y + box.height / 2 - (len(lines) - 1) * height / 2 + 4
        middle = (left + right) / 2
        shapes += [Text(middle, first + n * height, line, look.ink, "middle") for n, line in enumerate(lines)]
        break
    return shapes


# ---- SVG ------------------------------------------------------------------------------------------------------------


def _patterns() -> str:
    """Returns the SVG definitions of the patterns."""
    drawn = []
    for pattern, lines in PATTERN_LINES.items():
        path = " ".join(f"M{x0:g} {y0:g}L{x1:g} {y1:g}" for x0, y0, x1, y1 in lines)
        drawn.append(
            f'<pattern id="keepstep-{pattern}" width="{PATTERN_SIZE:g}" height="{PATTERN_SIZE:g}" '
            f'patternUnits="userSpaceOnUse"><path d="{path}" stroke="#ffffff" stroke-opacity="{PATTERN_OPACITY}" '
            'stroke-width="1.2"/></pattern>'
        )
    return "<defs>" + "".join(drawn) + "</defs>"


def _shape(shape: Shape) -> str:
    match shape:
        case Rectangle():
            return _box(shape)
        case Line(points, kind):
            return f'<polyline points="{_points(points)}" class="{kind}"/>'
        case Polygon(points, kind):
            return f'<polygon points="{_points(points)}" class="{kind}"/>'
        case Text(x, y, content, kind, anchor):
            placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
            return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{placed}>{escaped(content)}</text>'


def _box(box: Rectangle) -> str:
    radius = min(box.radius, box.width / 3, box.height / 3)
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" rx="{radius:.1f}"'
    hint = f"<title>{escaped(box.hint)}</title>" if box.hint else ""
    pattern = LOOKS[box.kind].pattern
    if pattern is None:
        return f'<rect {place} class="{box.kind}">{hint}</rect>' if hint else f'<rect {place} class="{box.kind}"/>'
    return f'<g>{hint}<rect {place} class="{box.kind}"/><rect {place} fill="url(#keepstep-{pattern})"/></g>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
