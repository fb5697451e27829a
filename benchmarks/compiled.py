"""Recovery of a compiled model beside the same one uncompiled: two kills in each drill, on two ranks with a spare.

    python benchmarks/compiled.py            about fifteen minutes on two idle cores
    python benchmarks/compiled.py --quick    a smoke test; nothing is written

The script is `tests/scripts/compiled.py`: as it is (``eager``), with `torch.compile` (``compiled``), and with a spare
that has compiled the model in `Session.warm_up` (``warm``). The three take turns. The gap includes the first step after
the recovery, which compiles the model where the spare has not.

Prints a table, and writes ``benchmarks/results/DATE-compiled.md``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import drills
import page
from page import RESULTS, Section
from rich.console import Console

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "compiled.py"
KINDS = ("eager", "warm", "compiled")
FAULTS = "kill@step=6,phase=forward,rank=1;kill@step=14,phase=backward,rank=0"
QUICK = {"drills": 1}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drills", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    return page.parsed(parser, QUICK)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all drills, the kinds in turns."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.drills):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            console.print(f"{kind} ...", highlight=False)
            arguments = ["--nproc-per-node", "2", "--spares", "1", "--faults", FAULTS, str(SCRIPT), kind]
            found[kind] += drills.drilled(kind, arguments)["gap_ms"]
    return {"gap_ms": found}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table."""
    plain = statistics.median(result["gap_ms"]["eager"])
    rows = [
        [
            kind,
            str(len(gaps)),
            f"{statistics.median(gaps):,.0f}",
            f"{max(gaps):,.0f}",
            f"{statistics.median(gaps) / plain:.2f}",
        ]
        for kind, gaps in result["gap_ms"].items()
    ]
    notes = [
        "gap: from the kill to the first completed step, in milliseconds, that step's own time included. ratio: of the "
        "medians, to that of the model that is not compiled.",
        "eager: not compiled. warm: compiled, and the spare has compiled it in `session.warm_up` before it is needed. "
        "compiled: the spare compiles it when it has a rank.",
        "The weights of all runs are those of a run without failures, bit for bit.",
    ]
    return [Section("Two kills in each drill", ("model", "kills", "gap, median", "longest", "ratio"), rows, notes)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("Recovery of a compiled model", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Runs the drills, prints the table, and writes the page."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = page.provenance("compiled.py")
    return page.carry_out("compiled", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
