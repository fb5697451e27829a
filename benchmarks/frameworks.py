"""Overhead of keepstep in the loops of frameworks without failures: steps of about 100 ms on 2 ranks.

    python benchmarks/frameworks.py            everything; about fifteen minutes on two idle cores
    python benchmarks/frameworks.py --quick    a smoke test; nothing is written

For each framework the same script (`train_framework.py`) runs under torchrun without keepstep, and under keepstep with
its integration. A third job runs under torchrun without the allocator's variables, which keepstep's workers get
(`docs/USAGE.md`) and which the other two jobs have here. The three take turns, as `overhead.py` describes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import page
import turns
from overhead import KINDS, NOT_COUNTED, UNSET, Shape, calibrated, one_start
from page import RESULTS, Section
from rich.console import Console

WORKER = Path(__file__).with_name("train_framework.py")
FRAMEWORKS = ("transformers", "accelerate", "lightning", "fabric")
RANKS = 2
STEP_MS, WIDTH, DEPTH = 100, 512, 8
QUICK = {
    "frameworks": ["accelerate", "lightning"],
    "starts": 1,
    "pairs": 1,
    "block_s": 0.2,
    "step_ms": 2,
    "width": 64,
    "depth": 2,
}


@dataclasses.dataclass(frozen=True)
class Loop(Shape):
    """The model that a job trains, and the framework whose loop it uses."""

    framework: str = ""

    def command(self, kind: str, num_ranks: int, folder: Path, *more: str) -> list[str]:
        """See `Shape.command`."""
        command = super().command(kind, num_ranks, folder, *more)
        at = next(place for place, word in enumerate(command) if word.endswith("train_timed.py"))
        command[at : at + 1] = [str(WORKER), self.framework]
        return command


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--starts", type=int, default=5, help="of both jobs, for each framework")
    parser.add_argument("--pairs", type=int, default=4, help="of turns, for each start")
    parser.add_argument("--block-s", type=float, default=1.5, help="how long a turn lasts (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="where the page goes (default: results)")
    parser.set_defaults(step_ms=STEP_MS, width=WIDTH, depth=DEPTH)
    return page.parsed(parser, QUICK)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all frameworks."""
    shape = calibrated(args.step_ms, args.width, args.depth)
    block = max(NOT_COUNTED + 3, round(args.block_s * 1000 / args.step_ms))
    found = {}
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as root:
        for framework in args.frameworks:
            console.print(f"{framework} ...", highlight=False)
            loop = Loop(shape.width, shape.depth, shape.batch, framework)
            starts = []
            for number in range(args.starts):
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    starts.append(one_start(loop, RANKS, block, args.pairs, number, Path(folder), (*KINDS, UNSET)))
            found[framework] = starts
    return {"frameworks": found}


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the table."""
    rows = [_row(framework, starts) for framework, starts in result["frameworks"].items()]
    rows.append(_row("all together", [start for starts in result["frameworks"].values() for start in starts]))
    starts = next(iter(result["frameworks"].values()))
    notes = [
        f"Milliseconds per step on {RANKS} ranks; each job started {len(starts)} times for each framework. more: "
        "keepstep's median step less that of the column before, of jobs that took turns; the median of all starts, "
        "and its bounds with 95 %.",
        "allocator as under keepstep: with the variables that keepstep's workers get by default, so that the rest is "
        "what keepstep itself costs. unset: torchrun as it is. Whether such a job then gives memory back to the kernel "
        "in each step is chance: some starts do, some do not.",
    ]
    columns = ("loop of", "keepstep", "torchrun, allocator as under keepstep", "more", "torchrun, unset", "more")
    return [Section("What a step takes", columns, rows, notes)]


def _row(name: str, starts: list[dict[str, Any]]) -> list[str]:
    row = [name, f"{statistics.median(start['median_ms']['keepstep'] for start in starts):.2f}"]
    for without in (KINDS[0], UNSET):
        plain = statistics.median(start["median_ms"][without] for start in starts)
        more = sorted(start["median_ms"]["keepstep"] - start["median_ms"][without] for start in starts)
        low, high = turns.interval(more)
        middle = statistics.median(more)
        row += [f"{plain:.2f}", f"{middle:+.2f} ({low:+.2f} to {high:+.2f}), {100 * middle / plain:+.2f} %"]
    return row


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    head = page.heading("The cost of a step in the loops of frameworks", result) + page.measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))


def main() -> int:
    """Runs the benchmark of the command line."""
    args = parse_arguments()
    console = Console()
    folder = args.results or (None if args.quick else RESULTS)
    known = page.provenance("frameworks.py")
    return page.carry_out("frameworks", known, lambda: measure(args, console), sections, markdown, console, folder)


if __name__ == "__main__":
    sys.exit(main())
