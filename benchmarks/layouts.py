"""Runs every sharded layout under the drill, with and without a spare: the result, and the time of a recovery.

    python benchmarks/layouts.py                  about half an hour on two idle cores
    python benchmarks/layouts.py --quick          a smoke test with one layout; nothing is written

Each layout is a small model on four ranks, and loses a rank in each phase of a step and one that hangs. Three of them
also lose ranks at random times. If the weights of a layout differ from those of a run without failures, the benchmark
ends with an error. The programs are those of tests/worker/constructs, which docs/upstream.md lists.

Prints a table, and writes ``benchmarks/results/DATE-layouts.md``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - the layouts are those of the tests
import drills
import page
from page import RESULTS, Section
from rich.console import Console
from tests.support import layouts

QUICK = {"only": "HSDP 2 × 2", "random_kills": 2}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=layouts.LAYOUTS, help="one layout")
    parser.add_argument("--random-kills", type=int, default=30, help="of three layouts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    return page.parsed(parser, QUICK)


def drill(layout: str, spares: int, faults: tuple[str, int]) -> dict[str, Any]:
    """Runs one drill, and returns its result. See `drills.drilled`."""
    return {"layout": layout, "spares": spares, **drills.drilled(layout, layouts.arguments(layout, spares, faults))}


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all drills, one after the other."""
    named = [args.only] if args.only else layouts.LAYOUTS
    found: dict[str, Any] = {"in_every_phase": [], "at_random": []}
    for layout in named:
        console.print(f"{layout} ...", highlight=False)
        found["in_every_phase"] += [drill(layout, spares, layouts.in_every_phase()) for spares in (1, 0)]
    for layout in layouts.AT_RANDOM:
        if layout in named:
            console.print(f"{layout}, at random instants ...", highlight=False)
            found["at_random"].append(drill(layout, 1, layouts.at_random(args.random_kills, args.seed)))
    return found


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the two tables."""
    spare, none = ([each for each in result["in_every_phase"] if each["spares"] == spares] for spares in (1, 0))
    rows = [
        [
            with_spare["layout"],
            ", ".join(with_spare["state_from"]),
            *drills.figures(with_spare),
            *drills.figures(without),
        ]
        for with_spare, without in zip(spare, none, strict=True)
    ]
    columns = ("layout", "state from", "again", "recovery, ms", "no spare: again", "recovery, ms")
    notes = [
        f"{spare[0]['num_faults']} faults in each run: a kill in each phase of a step, and a rank that hangs in its "
        "backward. The weights of all runs are those of a run without failures, bit for bit.",
        f"again: steps computed again after one fault, at the most. Snapshots are taken every {layouts.SNAPSHOT_EVERY} "
        "steps where a rank's shard has no replica.",
        "recovery: median of the kills, from the kill to the first completed step, without that step's own time. "
        "A spare of DDP has built its model before; one of a sharded script builds it when it has a rank. Without a "
        "spare a process has to be started first.",
    ]
    found = [Section("A kill in every phase, and a hang", columns, rows, notes)]
    if result["at_random"]:
        rows = [
            [each["layout"], str(each["num_faults"]), ", ".join(each["state_from"]), *drills.figures(each)]
            for each in result["at_random"]
        ]
        columns = ("layout", "kills", "state from", "again", "recovery, ms")
        found.append(Section("Kills at random instants, with a spare", columns, rows, ["The same weights, too."]))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    job = "* Jobs: four ranks on one node, each layout a model of some hundred parameters.\n"
    head = page.heading("Layouts", result) + job + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Runs the drills, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = {**page.provenance("layouts.py"), "settings": {"seed": args.seed}}
    return page.carry_out("layouts", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
