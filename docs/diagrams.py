"""Draws the state diagrams of docs/PROTOCOL.md from the tables that the code runs on.

    python docs/diagrams.py            redraw the page
    python docs/diagrams.py --check    change nothing; exit code 1 if the page is not what the tables say

A diagram stands between two comments, ``<!-- diagram: NAME -->`` and ``<!-- end of diagram -->``; what is between them
belongs to this script. `tests/test_docs.py` runs the check.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from keepstep.protocol import phases, recovery

PAGE = Path(__file__).with_name("PROTOCOL.md")
BLOCK = re.compile(r"(<!-- diagram: (?P<name>\w+) -->\n).*?(<!-- end of diagram -->)", re.DOTALL)

Arrow = tuple[str, str, str]
"""From, to, and what moves it."""


def phase_arrows() -> list[Arrow]:
    """The life of a step, as one rank's `StepMachine` walks it."""
    return [(source, target, event) for (source, event), target in phases.TRANSITIONS.items()]


def stage_arrows() -> list[Arrow]:
    """The stages of a job, as the controller's `RecoveryMachine` walks them."""
    return [
        (source, target, why) for source, targets in recovery.TRANSITIONS.items() for target, why in targets.items()
    ]


def mermaid(arrows: Iterable[Arrow], first: str, last: str | None) -> str:
    """A mermaid state diagram. Mermaid reads ``:`` and ``;`` in a label as its own, so they become a dash."""
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    for source, target, why in arrows:
        label = re.sub(r"\s*[:;]\s*", " – ", str(why))
        lines.append(f"    {source} --> {target}: {label}")
    if last is not None:
        lines.append(f"    {last} --> [*]")
    return "\n".join(["```mermaid", *lines, "```"])


def drawn() -> dict[str, str]:
    """Every diagram by its name."""
    return {
        "phases": mermaid(phase_arrows(), phases.Phase.STARTING, None),
        "stages": mermaid(stage_arrows(), recovery.Stage.STARTING, recovery.Stage.ENDED),
    }


def redrawn(page: str) -> str:
    """The page with every diagram redrawn.

    Raises:
        ValueError: the page asks for a diagram that is not known, or lacks one.
    """
    diagrams = drawn()
    asked = [match["name"] for match in BLOCK.finditer(page)]
    if sorted(asked) != sorted(diagrams):
        raise ValueError(f"the page has the diagrams {sorted(asked)}, and should have {sorted(diagrams)}")
    return BLOCK.sub(lambda match: f"{match[1]}{diagrams[match['name']]}\n{match[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the state diagrams of docs/PROTOCOL.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, only say whether the page is up to date")
    arguments = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = redrawn(before)
    if arguments.check:
        if after != before:
            print(f"{PAGE.name} is out of date: run 'python docs/diagrams.py'", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
