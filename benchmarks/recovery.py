"""Time of a recovery, and of its parts.

    python benchmarks/recovery.py                 about two minutes on two idle cores
    python benchmarks/recovery.py --quick         a smoke test with a tiny model; nothing is written

The benchmark kills ranks of a keepstep job at random times (kills_keepstep.py). `benchmarks/overhead.py` measures the
overhead without failures, and `benchmarks/peers.py` the recovery of other systems.

Prints tables, and writes ``benchmarks/results/DATE-recovery.md``. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import kills_keepstep
import page
from jobs import Workload
from page import RESULTS
from rich.console import Console
from train_plain import load_example

QUICK = {"kills": 2, "hurried_kills": 1, "size": "small"}


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills with a warm spare there (default: %(default)s)")
    parser.add_argument(
        "--hurried-kills", type=int, default=5, help="kills right after a recovery (default: %(default)s)"
    )
    parser.add_argument("--size", default="10m", help="a size of examples/train_gpt.py (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for any one wait (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    args = page.parsed(parser, QUICK)
    if args.kills < 1:
        parser.error(f"--kills {args.kills}: at least 1")
    return args


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures both series, one after the other."""
    workload = Workload(args.size, args.batch_size, 3, args.seed, args.deadline)
    console.print(f"{args.kills} kills, each with a warm spare there ...", highlight=False)
    parts = {"keepstep": kills_keepstep.measure(workload, args.kills, wait_for_spare=True)}
    if args.hurried_kills:
        console.print(f"{args.hurried_kills} kills right after a recovery ...", highlight=False)
        parts["keepstep_hurried"] = kills_keepstep.measure(workload, args.hurried_kills, wait_for_spare=False)
    return parts


def main() -> int:
    """Measures, prints the tables, and writes the page."""
    args = parse_arguments()
    console = Console()
    example = load_example()
    known: dict[str, Any] = {
        **page.provenance("recovery.py"),
        "settings": {
            "size": args.size,
            "parameters": sum(parameter.numel() for parameter in example.build_model(args.size).parameters()),
            "batch_size": args.batch_size,
            "world_size": 3,
            "seed": args.seed,
        },
    }
    folder = args.results or (None if args.quick else RESULTS)
    return page.carry_out(
        "recovery", known, lambda: measure(args, console), page.sections, page.markdown, console, folder
    )


if __name__ == "__main__":
    sys.exit(main())
