"""A picture as PNG, in light and at twice its size. Pillow is optional, and imported only when something is drawn."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.errors import ConfigurationError
from keepstep.trace.pictures.drawing import Line, Picture, Polygon, Rectangle, Text
from keepstep.trace.pictures.theme import INKS, LOOKS, PATTERN_LINES, PATTERN_OPACITY, PATTERN_SIZE, Pattern

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

SCALE = 2
SMOOTHING = 2
"""Everything is drawn so many times larger still, for smooth edges."""
_S = SCALE * SMOOTHING
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_PLAIN = str.maketrans({"…": "...", "–": "-", "×": "x", "·": "-", "“": '"', "”": '"', "’": "'"})


def require_pillow() -> None:
    """Raises:
    ConfigurationError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ConfigurationError("a .png needs Pillow: pip install 'keepstep[plot]', or name an .svg file")


def png(picture: Picture) -> bytes:
    """A picture in pixels.

    Raises:
        ConfigurationError: Pillow is not installed.
    """
    require_pillow()
    from PIL import Image

    size = (math.ceil(picture.width * _S), math.ceil(picture.height * _S))
    canvas = _Canvas(Image.new("RGB", size, "#ffffff"))
    for shape in picture.shapes:
        match shape:
            case Rectangle():
                canvas.box(shape)
            case Line(points, kind):
                canvas.line(points, kind)
            case Polygon(points, kind):
                canvas.polygon(points, kind)
            case Text():
                canvas.text(shape)
    file = io.BytesIO()
    canvas.image.reduce(SMOOTHING).save(file, "PNG", optimize=True)
    return file.getvalue()


class _Canvas:
    """Draws shapes on an image."""

    def __init__(self, image: Image) -> None:
        from PIL import ImageDraw

        self.image = image
        self._draw = ImageDraw.Draw(image)
        self._fonts: dict[str, FreeTypeFont | ImageFont] = {}
        self._patterns: dict[Pattern, Image] = {}

    def box(self, box: Rectangle) -> None:
        look = LOOKS[box.kind]
        place = [box.x * _S, box.y * _S, (box.x + box.width) * _S, (box.y + box.height) * _S]
        radius = min(box.radius, box.width / 3, box.height / 3) * _S
        fill, outline = look.fill and look.fill[0], look.stroke and look.stroke[0]
        if outline and look.dashes:
            self._draw.rounded_rectangle(place, radius, fill)
            x0, y0, x1, y1 = box.x, box.y, box.x + box.width, box.y + box.height
            self.line(((x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)), box.kind)
        else:
            self._draw.rounded_rectangle(place, radius, fill, outline, round(look.width * _S) if outline else 1)
        if look.pattern is not None:
            self._cover(place, radius, look.pattern)

    def _cover(self, place: Sequence[float], radius: float, pattern: Pattern) -> None:
        from PIL import Image, ImageChops, ImageDraw

        left, top, right, bottom = math.floor(place[0]), math.floor(place[1]), math.ceil(place[2]), math.ceil(place[3])
        if right <= left or bottom <= top:
            return
        mask = Image.new("L", (right - left, bottom - top))
        inside = [place[0] - left, place[1] - top, place[2] - left, place[3] - top]
        ImageDraw.Draw(mask).rounded_rectangle(inside, radius, round(255 * PATTERN_OPACITY))
        if pattern not in self._patterns:
            self._patterns[pattern] = _pattern(pattern, self.image.size)
        covered = ImageChops.multiply(mask, self._patterns[pattern].crop((left, top, right, bottom)))
        self.image.paste("#ffffff", (left, top), covered)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        look = LOOKS[kind]
        if look.stroke is None:
            return
        width = max(1, round(look.width * _S))
        parts = _dashed(points, look.dashes) if look.dashes else [points]
        for part in parts:
            self._draw.line([(x * _S, y * _S) for x, y in part], look.stroke[0], width, joint="curve")

    def polygon(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        look = LOOKS[kind]
        if look.fill is not None:
            self._draw.polygon([(x * _S, y * _S) for x, y in points], look.fill[0])
        if look.stroke is not None:
            self.line((*points, points[0]), kind)

    def text(self, text: Text) -> None:
        ink = INKS[text.kind]
        if text.kind not in self._fonts:
            self._fonts[text.kind] = _font(ink.size * _S, ink.is_bold)
        font = self._fonts[text.kind]
        place, anchor = (text.x * _S, text.y * _S), _ANCHORS[text.anchor]
        content = (
            text.content if _FONTS is not None else text.content.translate(_PLAIN).encode("ascii", "replace").decode()
        )
        self._draw.text(place, content, ink.colour[0], font, anchor)


def _matplotlib_fonts() -> Path | None:
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return folder if (folder / "DejaVuSans-Bold.ttf").is_file() else None


_FONTS = _matplotlib_fonts()
"""matplotlib, of the same extra, brings DejaVu Sans along. Pillow's own font has only the letters of ASCII."""


def _font(size: float, is_bold: bool) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    if _FONTS is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(str(_FONTS / ("DejaVuSans-Bold.ttf" if is_bold else "DejaVuSans.ttf")), size)


def _pattern(pattern: Pattern, size: tuple[int, int]) -> Image:
    from PIL import Image, ImageDraw

    step = round(PATTERN_SIZE * _S)
    tile = Image.new("L", (step, step))
    for line in PATTERN_LINES[pattern]:
        ImageDraw.Draw(tile).line([at * _S for at in line], 255, round(1.2 * _S))
    whole = Image.new("L", size)
    row = Image.new("L", (size[0], step))
    for x in range(0, size[0], step):
        row.paste(tile, (x, 0))
    for y in range(0, size[1], step):
        whole.paste(row, (0, y))
    return whole


def _dashed(points: Sequence[tuple[float, float]], dashes: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The dashes along a line, each with its begin and end."""
    parts = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        at, number = 0.0, 0
        while at < length:
            end = min(length, at + dashes[number % len(dashes)])
            if number % 2 == 0:
                begin_x, begin_y = x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length
                parts.append([(begin_x, begin_y), (x0 + (x1 - x0) * end / length, y0 + (y1 - y0) * end / length)])
            at, number = end, number + 1
    return parts
