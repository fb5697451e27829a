"""docs/porting.md shows what changes between the two scripts of each pair, and that it is little."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "porting.md"
FOLDER = ROOT / "examples" / "porting"
SIDES = ("before", "after")
MOST = {"hf_trainer": 5, "sft": 5, "lightning": 5, "gan": 12, "images": 14, "fsdp2": 12, "hydra": 12, "publish": 20}
"""How many lines a port may change. The loop of `images` sums up, keeps a best value, and logs: two lines too many.
That of `publish` has two programs."""


def lines_of(name: str) -> list[str]:
    return (FOLDER / f"{name}.py").read_text("utf-8").splitlines()


def diff_of(name: str) -> str:
    lines = difflib.unified_diff(lines_of(f"{name}_before"), lines_of(f"{name}_after"), n=1, lineterm="")
    return "\n".join(list(lines)[2:])


def changed_lines(before: list[str], after: list[str]) -> int:
    """Lines that were added, taken away or replaced, without blank ones; an indentation alone is no change."""
    one, two = ([line.strip() for line in lines if line.strip()] for lines in (before, after))
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal")


def test_all_pairs_are_on_the_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {f"{name}_{side}" for name in MOST for side in SIDES}
    assert set(re.findall(r"`(\w+)_before\.py`", PAGE.read_text("utf-8"))) == MOST.keys()


@pytest.mark.parametrize("name", MOST)
def test_the_page_shows_the_diff(name: str) -> None:
    if f"```diff\n{diff_of(name)}\n```\n" not in PAGE.read_text("utf-8"):
        pytest.fail(f"docs/porting.md has another diff than\n{diff_of(name)}", pytrace=False)


@pytest.mark.parametrize("name", MOST)
def test_few_lines_are_changed(name: str) -> None:
    before, after = lines_of(f"{name}_before"), lines_of(f"{name}_after")
    assert not any("keepstep" in line for line in before)
    found = changed_lines(before, after)
    assert 0 < found <= MOST[name]
    assert f"/{name}_after.py): {found} changed lines" in PAGE.read_text("utf-8")


def test_an_edited_line_counts_once_and_an_indentation_not() -> None:
    assert changed_lines(["a", "b", "", "c"], ["a", "x", "  c", "d"]) == 2
