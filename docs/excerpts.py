"""Brings the stories that the pages show up to date with where they are from.

    python docs/excerpts.py            bring the pages up to date
    python docs/excerpts.py --check    change nothing; exit code 1 if a page is not up to date

An excerpt stands between ``<!-- excerpt: SOURCE -->`` and ``<!-- end of excerpt -->``; ``...`` stands where lines were
left out. A source is one of:

* ``scenario NAME``, the story in ``tests/scenarios/NAME.txt``. The lines are chosen by hand. Their times are brought up
  to date; a line whose words are no longer in the story is an error, and somebody has to choose again.
* ``seed N``, what ``keepstep simulate --seed N`` prints. The lines are chosen by `outline`.

`tests/test_docs.py` runs the check.
"""

import argparse
import re
import sys
from pathlib import Path

from keepstep.sim.run import case_of, run

FOLDER = Path(__file__).resolve().parent
PAGES = (FOLDER / "PROTOCOL.md", FOLDER / "SIMULATION.md")
SCENARIOS = FOLDER.parent / "tests" / "scenarios"
EXCERPT = re.compile(
    r"(?P<head><!-- excerpt: (?P<kind>scenario|seed) (?P<name>\w+) -->\n```text\n)"
    r"(?P<lines>.*?)(?P<tail>```\n<!-- end of excerpt -->)",
    re.DOTALL,
)
TIME = re.compile(r"^ *\d+\.\d{3}(?=  )")
TOLD = re.compile(r" *\d+\.\d{3}  (FAULT|node-\d+|controller|END) ")
LEFT_OUT = "      ..."
MAX_OUTLINE_LINES = 16


def excerpt(kind: str, name: str, before: list[str]) -> list[str]:
    """The lines of an excerpt as they are to be now, given what they were."""
    if kind == "seed":
        return outline(list(run(case_of(int(name)), tell=True).story))
    return fitted(before, (SCENARIOS / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def outline(story: list[str]) -> list[str]:
    """The beginning of a story, and of the rest what failed, what nodes said, what the controller did, and the end."""
    first = next((number for number, line in enumerate(story) if "  FAULT  " in line), len(story))
    chosen = [line for line in story[first:] if TOLD.match(line)]
    if len(chosen) > MAX_OUTLINE_LINES:
        chosen = [*chosen[: MAX_OUTLINE_LINES - 1], chosen[-1]]
    return fitted([*(line for line in story[:first] if not TIME.match(line)), *chosen], story)


def fitted(lines: list[str], story: list[str]) -> list[str]:
    """The lines of an excerpt as they stand in the story now, with a mark wherever some are left out.

    Raises:
        ValueError: one of them is not there, or not after the one before it.
    """
    words = [TIME.sub("", line) for line in story]
    fitting: list[str] = []
    at = -1
    for line in lines:
        if line == LEFT_OUT:
            continue
        try:
            found = words.index(TIME.sub("", line), at + 1)
        except ValueError:
            raise ValueError(f"no such line, or not in this place: {line}") from None
        if fitting and found > at + 1:
            fitting.append(LEFT_OUT)
        fitting.append(story[found])
        at = found
    if at + 1 < len(story):
        fitting.append(LEFT_OUT)
    return fitting


def redrawn(page: str) -> str:
    """The page with every excerpt brought up to date.

    Raises:
        ValueError: a line of one is no longer in its source.
    """

    def replaced(match: re.Match[str]) -> str:
        try:
            lines = excerpt(match["kind"], match["name"], match["lines"].splitlines())
        except ValueError as error:
            raise ValueError(f"excerpt of {match['kind']} {match['name']}: {error}") from None
        return "".join([match["head"], *(f"{line}\n" for line in lines), match["tail"]])

    return EXCERPT.sub(replaced, page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Bring the stories that the pages show up to date.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, only say whether the pages are up to date"
    )
    arguments = parser.parse_args()
    is_stale = False
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = redrawn(before)
        if arguments.check and after != before:
            print(f"{page.name} is out of date: run 'python docs/excerpts.py'", file=sys.stderr)
            is_stale = True
        elif not arguments.check:
            page.write_text(after, encoding="utf-8")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())
