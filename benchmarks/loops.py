"""Runs every example of docs/integrations under the drill, with and without a spare, and with two ranks lost at once.

    python benchmarks/loops.py                  about fifteen minutes on two idle cores
    python benchmarks/loops.py --quick          a smoke test with one example; nothing is written

Each example trains on three ranks, in the loop of a framework or in a user's loop over epochs. It loses a rank in each
phase of a step, and one that hangs; in a second run two ranks at once. Weights, metrics, logs and checkpoints must be
equal to those of a run without failures. Otherwise the benchmark ends with an error.

Prints a table, and writes ``benchmarks/results/DATE-loops.md``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the examples' options are those of the tests
import drills
import page
from page import RESULTS, Section
from rich.console import Console
from tests.support import loops

QUICK = {"only": ["fabric"]}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=loops.FILES, default=list(loops.FILES), help="some examples")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all drills, one after the other."""
    found = []
    for name in args.only:
        console.print(f"{name} ...", highlight=False)
        one = {"example": name}
        for key, spares, faults in (
            ("spare", 1, loops.in_every_phase(name)),
            ("no_spare", 0, loops.in_every_phase(name)),
            ("two_at_once", 2, loops.two_at_once(name)),
        ):
            one[key] = drills.drilled(name, loops.arguments(name, spares, faults))
        found.append(one)
    return {"examples": found}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table."""
    rows = [
        [
            f"`{each['example']}.py`",
            str(len(each["spare"]["files"])),
            *(text for key in ("spare", "no_spare", "two_at_once") for text in drills.figures(each[key])),
        ]
        for each in result["examples"]
    ]
    columns = (
        "example",
        "files",
        "again",
        "recovery, ms",
        "no spare: again",
        "recovery, ms",
        "two: again",
        "recovery, ms",
    )
    notes = [
        f"{result['examples'][0]['spare']['num_faults']} faults in each of the first two runs: a kill in each phase of "
        "a step, and a rank that hangs in its backward. two: two of three ranks are killed in one backward, with two "
        "spares.",
        "The weights of all runs, and so many files that they wrote, are those of a run without failures, bit for bit.",
        "again: steps computed again after one fault, at the most. recovery: median of the kills, from the kill to the "
        "first completed step, without that step's own time.",
    ]
    return [Section("A kill in every phase, and a hang; two at once", columns, rows, notes)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    job = "* Jobs: three ranks on one node; the scripts are those of examples/integrations.\n"
    head = page.heading("Loops of frameworks", result) + job + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Runs the drills, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = page.provenance("loops.py")
    return page.carry_out("loops", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
