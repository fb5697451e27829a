"""How long a recovery takes, and what being able to recover costs while nothing fails.

    python benchmarks/recovery.py                 everything; about ten minutes on two idle cores
    python benchmarks/recovery.py --only C        one part
    python benchmarks/recovery.py --quick         a smoke test with a tiny model; nothing is written

A  kills_keepstep.py   ranks of a keepstep job are killed at random instants
B  kills_torchrun.py   the same job under torchrun with checkpoints on disk
C  failure_free.py     step time without failures, keepstep against plain DistributedDataParallel

Prints tables, and writes ``benchmarks/results/DATE-recovery.md`` with the raw figures in a .json beside it. The machine
should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import failure_free
import kills_keepstep
import kills_torchrun
import page
from jobs import Workload
from page import RESULTS
from rich.console import Console
from train_plain import load_example

QUICK = {"kills": 2, "hurried_kills": 1, "torchrun_kills": 1, "pairs": 1, "turns": 2, "steps": 8, "size": "small"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="A: kills with a warm spare there (default: %(default)s)")
    parser.add_argument(
        "--hurried-kills", type=int, default=5, help="A: kills right after a recovery (default: %(default)s)"
    )
    parser.add_argument("--torchrun-kills", type=int, default=5, help="B: kills (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="C: pairs of whole runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="C: steps of a run (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=30, help="C: pairs of turns (default: %(default)s)")
    parser.add_argument("--block", type=int, default=6, help="C: steps of a turn (default: %(default)s)")
    parser.add_argument("--size", default="10m", help="a size of examples/train_gpt.py (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="windows per rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("A", "B", "C"), help="one part")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for any one wait (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, help=f"where the page goes (default: {RESULTS.parent.name}/{RESULTS.name})"
    )
    args = page.parsed(parser, QUICK)
    for name in ("kills", "torchrun_kills", "pairs", "turns"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1; leave a part out with --only")
    if args.steps < 3 or args.block < 3:
        parser.error("--steps and --block: at least 3, for the first ones are not counted")
    return args


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The chosen parts, one after the other."""
    workload = Workload(args.size, args.batch_size, 3, args.seed, args.deadline)
    parts: dict[str, dict[str, Any]] = {}

    def part(letter: str, what: str) -> bool:
        if args.only in (None, letter):
            console.print(f"{letter}: {what} ...", highlight=False)
            return True
        return False

    if part("A", f"{args.kills} kills under keepstep, each with a warm spare there"):
        parts["keepstep"] = kills_keepstep.measure(workload, args.kills, wait_for_spare=True)
    if args.hurried_kills and part("A", f"{args.hurried_kills} kills right after a recovery"):
        parts["keepstep_hurried"] = kills_keepstep.measure(workload, args.hurried_kills, wait_for_spare=False)
    if part("B", f"{args.torchrun_kills} kills under torchrun"):
        parts["torchrun"] = kills_torchrun.measure(workload, args.torchrun_kills)
    if part("C", f"{args.pairs} pairs of runs of {args.steps} steps"):
        parts["runs"] = failure_free.measure_runs(workload, args.pairs, args.steps)
    if part("C", f"{args.turns} pairs of turns of {args.block} steps"):
        parts["turns"] = failure_free.measure_turns(workload, args.turns, args.block)
    return parts


def main() -> int:
    """Measures, shows, writes."""
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
