"""The style of every kind of shape and text, in one table.

Colours also differ in lightness, and areas have patterns, so that a picture is readable without colour vision and in
black and white.
"""

from __future__ import annotations

import dataclasses
import enum

FONTS = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'


class Pattern(enum.StrEnum):
    """A pattern of thin lines over an area."""

    RISING = "rising"
    FALLING = "falling"
    UPRIGHT = "upright"
    LEVEL = "level"
    CROSSED = "crossed"


PATTERN_SIZE = 6.0
"""Size of a pattern's tile in pixels."""
PATTERN_OPACITY = 0.22
PATTERN_LINES: dict[Pattern, tuple[tuple[float, float, float, float], ...]] = {
    # The first and last line of a slanted pattern complete the corners of the tile.
    Pattern.RISING: ((-1.5, 1.5, 1.5, -1.5), (0, 6, 6, 0), (4.5, 7.5, 7.5, 4.5)),
    Pattern.FALLING: ((-1.5, 4.5, 1.5, 7.5), (0, 0, 6, 6), (4.5, -1.5, 7.5, 1.5)),
    Pattern.UPRIGHT: ((3, 0, 3, 6),),
    Pattern.LEVEL: ((0, 3, 6, 3),),
    Pattern.CROSSED: ((3, 0, 3, 6), (0, 3, 6, 3)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The style of an area or a line. Colours are (light, dark); None draws nothing."""

    fill: tuple[str, str] | None = None
    stroke: tuple[str, str] | None = None
    width: float = 1.0
    dashes: tuple[float, ...] = ()
    pattern: Pattern | None = None
    ink: str = "on"
    """The kind of text that is readable on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ink:
    """The style of a text. Colours are (light, dark)."""

    size: float
    colour: tuple[str, str]
    is_bold: bool = False


_TEXT, _QUIET, _RULE = ("#1f2328", "#f0f6fc"), ("#59636e", "#9198a1"), ("#d0d7de", "#3d444d")

INKS = {
    "title": Ink(15, _TEXT, is_bold=True),
    "head": Ink(13, _TEXT, is_bold=True),
    "name": Ink(13, _TEXT, is_bold=True),
    "plain": Ink(13, _TEXT),
    "quiet": Ink(12, _QUIET),
    "small": Ink(11, _QUIET),
    "on": Ink(11.5, ("#ffffff", "#ffffff")),
    "under": Ink(11.5, _TEXT),
}

LOOKS = {
    "panel": Look(("#ffffff", "#0d1117"), _RULE),
    "rail": Look(None, _RULE),
    "tick": Look(None, ("#eaeef2", "#21262d")),
    "axis": Look(None, ("#818b98", "#656c76")),
    # What a rank does in a step.
    "forward": Look(("#0969da", "#1f6feb")),
    "backward": Look(("#1a7f37", "#238636"), pattern=Pattern.RISING),
    "optimizer": Look(("#bc4c00", "#bd561d"), pattern=Pattern.UPRIGHT),
    "barrier": Look(None, ("#1f2328", "#f0f6fc"), 3),
    # What it does in a recovery.
    "stop": Look(("#424a53", "#6e7681"), pattern=Pattern.FALLING),
    "decide": Look(("#eaeef2", "#21262d"), ("#818b98", "#656c76"), ink="under"),
    "reset": Look(("#6e7781", "#4d5560"), pattern=Pattern.LEVEL),
    "restore": Look(("#8250df", "#8957e5"), pattern=Pattern.FALLING),
    "send": Look(("#6639ba", "#6e40c9")),
    "advance": Look(("#953800", "#9e4c14"), pattern=Pattern.LEVEL),
    "rewind": Look(("#bf3989", "#bf4b8a"), pattern=Pattern.CROSSED),
    "rollback": Look(("#57606a", "#5b636e"), pattern=Pattern.UPRIGHT),
    "wait": Look(("#f6f8fa", "#161b22"), ("#afb8c1", "#4d5560"), dashes=(3, 3), ink="under"),
    "silent": Look(("#ffebe9", "#490202"), ("#cf222e", "#f85149"), dashes=(3, 3), ink="under"),
    # The failure, and the spare that takes the rank.
    "moment": Look(None, ("#cf222e", "#f85149"), 1.25, (4, 4)),
    "bolt": Look(("#d4a72c", "#d4a72c"), ("#9a6700", "#f0d080")),
    "gone": Look(None, ("#cf222e", "#f85149"), 1.5, (1, 4)),
    "warm": Look(None, ("#818b98", "#818b98"), 2, (2, 5)),
    "takes": Look(None, ("#8250df", "#ab7df8"), 2),
    "arrow": Look(("#8250df", "#ab7df8")),
    "gap": Look(("#ffffff", "#0d1117")),
    "cut": Look(None, ("#59636e", "#9198a1"), 1.25),
    # The state of the parameters.
    "band": Look(("#ddf4ff", "#0c2d6b"), ("#54aeff", "#388bfd"), ink="under"),
    "between": Look(("#fff1e5", "#5a1e02"), ("#fb8f44", "#db6d28"), pattern=Pattern.CROSSED, ink="under"),
    # Snapshots in memory.
    "snapshot": Look(None, ("#a3417c", "#e08cc0"), 1.5),
    "complete": Look(("#a3417c", "#e08cc0")),
    "loaded": Look(None, ("#a3417c", "#e08cc0"), 1.25, (1.5, 3)),
    # Moving weights.
    "h2d": Look(("#0969da", "#1f6feb")),
    "broadcast": Look(("#8250df", "#8957e5"), pattern=Pattern.FALLING),
    "reload": Look(("#1a7f37", "#238636"), pattern=Pattern.RISING),
}


def _rules(mode: int) -> list[str]:
    rules = [f".picture text {{ fill: {INKS['plain'].colour[mode]}; }}"]
    rules += [f".picture .{kind} {{ fill: {ink.colour[mode]}; }}" for kind, ink in INKS.items()]
    for kind, look in LOOKS.items():
        fill = look.fill[mode] if look.fill else "none"
        stroke = look.stroke[mode] if look.stroke else "none"
        rules.append(f".picture .{kind} {{ fill: {fill}; stroke: {stroke}; }}")
    return rules


def _style() -> str:
    rules = [f".picture text {{ font-family: {FONTS}; }}"]
    for kind, ink in INKS.items():
        weight = " font-weight: 600;" if ink.is_bold else ""
        rules.append(f".picture .{kind} {{ font-size: {ink.size:g}px;{weight} }}")
    for kind, look in LOOKS.items():
        if look.stroke:
            dashes = f" stroke-dasharray: {' '.join(map(str, look.dashes))};" if look.dashes else ""
            rules.append(f".picture .{kind} {{ stroke-width: {look.width:g};{dashes} }}")
    day, night = _rules(0), _rules(1)
    changed = [rule for rule in night if rule not in day]
    return "\n".join([*rules, *day, "@media screen and (prefers-color-scheme: dark) {", *changed, "}"])


STYLE = _style()
"""The style sheet of every picture. It applies to elements inside of the class ``picture``."""
