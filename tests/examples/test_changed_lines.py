"""The examples of docs/integrations: a patch shows what each changes, as many lines as the table says, and few."""

import ast
import difflib
import re
from pathlib import Path

import pytest
from tests.support.jobs import EXAMPLES, ROOT, without_keepstep

FOLDER = EXAMPLES / "integrations"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PLAIN_LOOPS = ("imagenet", "mingpt", "nanogpt")
MOST = 5
MOST_OF_PLAIN_LOOPS = 12


def lines_of(path: Path) -> list[str]:
    """The lines of code, without blank ones and the text at the top."""
    text = path.read_text("utf-8")
    first = ast.parse(text).body[0].end_lineno or 0
    return [line for line in text.splitlines()[first:] if line.strip()]


def changed_lines(plain: Path, changed: Path) -> int:
    """Lines that were added, taken away, or replaced by another one."""
    matcher = difflib.SequenceMatcher(None, lines_of(plain), lines_of(changed), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal")


def table() -> dict[str, int]:
    rows = re.findall(
        r"^\| \[`(\w+)\.py`\]\(.*?\) \|.*\| (\d+) \|", (ROOT / "docs/integrations/README.md").read_text(), re.MULTILINE
    )
    return {name: int(number) for name, number in rows}


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_are_changed(name: str, tmp_path: Path) -> None:
    plain = without_keepstep(name, tmp_path)
    assert "keepstep" not in plain.read_text("utf-8")
    found = changed_lines(plain, FOLDER / f"{name}.py")
    assert 0 < found <= (MOST_OF_PLAIN_LOOPS if name in PLAIN_LOOPS else MOST)
    assert table()[name] == found


def test_the_table_has_all_examples() -> None:
    assert sorted(table()) == NAMES
