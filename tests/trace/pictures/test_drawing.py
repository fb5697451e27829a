"""Shapes become SVG: whatever a text says, the file is whole, and labels stay where there is room."""

import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageFont

from keepstep.trace.pictures.drawing import (
    LabelRow,
    Line,
    Picture,
    Polygon,
    Rectangle,
    Text,
    arrow,
    escaped,
    fitting,
    labelled_box,
    shortened,
    text_width,
)
from keepstep.trace.pictures.recovery import BOX_LABELS
from keepstep.trace.pictures.theme import INKS, LOOKS

SVG = "{http://www.w3.org/2000/svg}"


def is_forbidden(character: str) -> bool:
    """Whether XML 1.0 has no room for a character."""
    is_control = character < " " and character not in "\t\n\r"
    return is_control or "\ud800" <= character <= "\udfff" or character in "\ufffe\uffff"


@given(st.text(min_size=1))
def test_any_text_comes_out_as_it_is(content: str) -> None:
    picture = Picture(100, 50, content, [Text(1, 2, content, "plain"), Rectangle(0, 0, 9, 9, "forward", hint=content)])
    root = ET.fromstring(picture.svg())
    (text,) = root.iter(f"{SVG}text")
    (hint,) = root.iter(f"{SVG}title")
    expected = (
        "".join("?" if is_forbidden(c) else c for c in content).replace("\r\n", "\n").replace("\r", "\n")
    )  # as XML reads the ends of lines
    assert (text.text or "") == expected
    assert (hint.text or "") == expected


@pytest.mark.parametrize("mark", ["<script>", '"', "'", "&amp;", "]]>"])
def test_nothing_gets_out_of_an_attribute_or_an_element(mark: str) -> None:
    assert not set("<>\"'") & set(escaped(mark))
    svg = Picture(10, 10, mark, [Text(0, 0, mark, "on")]).svg()
    assert ET.fromstring(svg).get("aria-label") == mark


@given(st.lists(st.tuples(st.floats(0, 400), st.text("abcW. ", min_size=1, max_size=12)), max_size=12))
def test_labels_of_a_row_do_not_touch(wanted: list[tuple[float, str]]) -> None:
    row = LabelRow(0, 400)
    placed = [text for x, word in wanted for text in row.place(Text(x, 10, word, "small", "middle"))]
    spans = sorted(text.span for text in placed if isinstance(text, Text))
    assert all(begin >= 0 and end <= 400 for begin, end in spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))


def test_a_row_takes_the_first_label_and_refuses_what_would_cover_it() -> None:
    row = LabelRow(0, 400)
    assert row.place(Text(200, 10, "first", "small", "middle"))
    assert not row.place(Text(205, 10, "second", "small", "middle"))
    assert row.place(Text(300, 10, "third", "small", "middle"))


@given(st.floats(1, 300), st.sampled_from(["forward", "wait", "band"]))
def test_a_label_fits_its_box(width: float, kind: str) -> None:
    box = Rectangle(10, 10, width, 32, kind)
    drawn = labelled_box(box, ["Restoration + Rollback", "Restoration\n+ Rollback", "Restore", "R"])
    assert drawn[0] is box
    for text in drawn[1:]:
        assert isinstance(text, Text)
        begin, end = text.span
        assert begin >= 10
        assert end <= 10 + width
        assert box.y < text.y < box.y + box.height


def test_a_label_is_shortened_step_by_step() -> None:
    def label(width: float) -> list[str]:
        drawn = labelled_box(
            Rectangle(0, 0, width, 32, "restore"), ["Restoration + Rollback", "Restoration\n+ Rollback", "R"]
        )
        return [text.content for text in drawn if isinstance(text, Text)]

    assert label(300) == ["Restoration + Rollback"]
    assert label(110) == ["Restoration", "+ Rollback"]
    assert label(20) == ["R"]
    assert label(5) == []


@given(st.text("abcdefgh mW", max_size=60), st.floats(0, 300))
def test_a_text_is_cut_off_where_it_is_too_wide(content: str, width: float) -> None:
    found = shortened(content, "title", width)
    assert not found or text_width(found, "title") <= width
    assert found in (content, "") or (found.endswith("…") and content.startswith(found[:-1]))


def test_the_first_label_that_fits() -> None:
    assert fitting(["a long label", "short"], "plain", 50) == "short"
    assert fitting(["a long label", "short"], "plain", 5) == ""


def test_the_labels_of_boxes_are_no_wider_than_their_boxes() -> None:
    """In DejaVu Sans, which is the widest of the common fonts. A box leaves 6 pixels beside its label."""
    font = ImageFont.truetype("DejaVuSans.ttf", 1000)
    for line in (line for labels in BOX_LABELS.values() for label in labels for line in label.split("\n")):
        assert font.getlength(line) / 1000 * INKS["on"].size <= text_width(line, "on") + 6, line


def test_an_arrow_ends_at_its_tip() -> None:
    line, head = arrow([(0, 0), (0, 50), (100, 50)], "takes", "arrow", size=10)
    assert isinstance(line, Line)
    assert isinstance(head, Polygon)
    assert line.points == ((0, 0), (0, 50), (90, 50))
    assert head.points[0] == (100, 50)


@pytest.mark.parametrize("kind", [kind for kind, look in LOOKS.items() if look.fill])
def test_every_kind_of_area_is_drawn_in_its_colour(kind: str) -> None:
    svg = Picture(60, 40, "a box", [Rectangle(5, 5, 50, 30, kind)]).svg()
    look = LOOKS[kind]
    assert look.fill is not None
    assert f".picture .{kind} {{ fill: {look.fill[0]};" in svg
    drawn = [element.get("fill") for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")]
    assert drawn == ([None, f"url(#keepstep-{look.pattern})"] if look.pattern else [None])
