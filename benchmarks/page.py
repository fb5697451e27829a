"""The output of a benchmark: tables on the terminal, and a page in Markdown.

After the parts that all benchmarks share, this file contains the tables of `benchmarks/recovery.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from jobs import JobFailed
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
"""The default folder for pages."""
PARTS = ("die", "detect", "stop", "decide", "reset", "restore", "resume")
Rows = list[list[str]]


def parsed(parser: argparse.ArgumentParser, quick: Mapping[str, Any]) -> argparse.Namespace:
    """Parses the command line of a benchmark. The flag ``--quick`` sets the values of ``quick``."""
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny, and its figures mean nothing")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(quick)
    return args


def provenance(script: str) -> dict[str, Any]:
    """Returns date, command and machine of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "machine": describe_machine(),
    }


def describe_machine() -> dict[str, Any]:
    """Returns the properties of the machine that affect the figures, without its name."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class Section:
    """A table with a title and notes, for the terminal and for the page."""

    def __init__(self, title: str, columns: Sequence[str], rows: Rows, notes: Sequence[str]) -> None:
        self.title, self.columns, self.rows, self.notes = title, columns, rows, notes

    def show(self, console: Console) -> None:
        """Prints the table."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, markup=False)
        console.print()

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("| --- |" + " ---: |" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"* {note}" for note in self.notes), ""])


def measure_parts(
    parts: Iterable[tuple[str, str, Callable[[argparse.Namespace, Path], Any]]],
    args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Measures the parts of a benchmark, or only the one of ``--only``. Returns the results by name.

    Args:
        parts: letter, name and function of each part. The function gets the command line and a folder.
        args: the command line.
        console: where to print the progress.
    """
    found: dict[str, Any] = {}
    for letter, name, function in parts:
        if args.only in (None, letter):
            console.print(f"{letter}: {name} ...", highlight=False)
            with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
                found[name] = function(args, Path(folder))
    return found


def carry_out(
    name: str,
    result: dict[str, Any],
    measure: Callable[[], dict[str, Any]],
    sections: Callable[[dict[str, Any]], Iterable[Section]],
    markdown: Callable[[dict[str, Any]], str],
    console: Console,
    folder: Path | None,
) -> int:
    """Runs a benchmark: measures, prints the tables and writes the page. Returns the exit code.

    Args:
        name: the name of the benchmark.
        result: the values that are known before, with those of `provenance`.
        measure: returns the measured values, which are added to the result.
        sections: returns the tables of a result.
        markdown: see `write`.
        console: where to print the tables and the progress.
        folder: see `write`; None: no page is written.
    """
    begun_s = time.monotonic()
    try:
        result = result | measure()
    except JobFailed as error:
        console.print(f"[red]{name}.py:[/red] {error}", highlight=False)
        return 1
    result["minutes"] = round((time.monotonic() - begun_s) / 60, 1)
    console.print()
    for section in sections(result):
        section.show(console)
    if folder is not None:
        console.print(f"written: {write(folder, name, result, markdown)}", highlight=False)
    return 0


def write(folder: Path, name: str, result: dict[str, Any], markdown: Callable[[dict[str, Any]], str]) -> Path:
    """Writes the page, and returns its path.

    Args:
        folder: the folder, which is created if needed.
        name: the name of the benchmark.
        result: its figures, with those of `provenance`.
        markdown: returns the page for the result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['date']}-{name}.md"
    path.write_text(markdown(result), encoding="utf-8")
    return path


def heading(title: str, result: dict[str, Any]) -> str:
    """Returns the beginning of a page: its title, the command and the machine."""
    machine = result["machine"]
    return f"""# {title}, {result["date"]}

`{result["command"]}`

* Machine: {machine["cores"]} cores ({machine["processor"]}), {machine["memory_gib"]} GiB, {machine["system"]}; load
  before the run {machine["load_at_start"]}. Python {machine["python"]}, torch {machine["torch"]}, gloo, CPU.
"""


def measured_in(result: dict[str, Any]) -> str:
    """Returns the line about the run."""
    run = f"one run of {result['minutes']} minutes"
    return f"""* Everything was measured in {run}. Ratios carry over to another machine better than
  milliseconds do.
"""


# ---- recovery.py ----------------------------------------------------------------------------------------------------


def sections(result: dict[str, Any]) -> list[Section]:
    """Returns the tables of the parts that were measured."""
    found = [_gaps(result)]
    for key, title in (
        ("keepstep", "Where keepstep's time goes"),
        ("keepstep_hurried", "... in the kills in a row"),
    ):
        if key in result:
            found.append(_parts(title, result[key]))
    return found


def _gaps(result: dict[str, Any]) -> Section:
    rows: Rows = []
    notes = [
        "gap: from the kill to the first step that all ranks completed after it. recovery: the same without that "
        "step's own time.",
        "again: steps computed again, the one in which the rank was killed included.",
    ]
    for key, name in (
        ("keepstep", "keepstep, spare warm"),
        ("keepstep_hurried", "keepstep, kills in a row"),
    ):
        if key not in result:
            continue
        kills = result[key]["kills"]
        again = [kill["steps_again"] for kill in kills if kill["steps_again"] is not None]
        columns = [[kill[column] for kill in kills] for column in ("gap_ms", "recovery_ms")]
        figures = [f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})" for values in columns]
        rows.append(
            [
                name,
                str(len(kills)),
                *figures,
                f"{statistics.median(again):g} (≤ {max(again)})",
                _ms(result[key]["step_ms"]),
            ]
        )
    columns = ("ms: median (min–max)", "kills", "gap", "recovery", "again", "a step")
    return Section("From a kill to the next completed step", columns, rows, notes)


def _parts(title: str, series: dict[str, Any]) -> Section:
    kills = series["kills"]
    rows: Rows = []
    for part in PARTS:
        values = [kill[f"{part}_ms"] for kill in kills if kill[f"{part}_ms"] is not None]
        rows.append([part, *_five(values)])
    rows.append(["of restore: the bytes", *_five([kill["bytes_ms"] for kill in kills])])
    whole = [kill["recovery_ms"] for kill in kills]
    rows.append(["all, the step not counted", *_five(whole)])
    without = [each - kill["bytes_ms"] for each, kill in zip(whole, kills, strict=True)]
    rows.append(["all, without step and bytes", *_five(without)])
    moved = max(kill["received_bytes"] for kill in kills)
    ready = sum(kill["spare_was_ready"] for kill in kills)
    notes = [
        "die: kill → the kernel has ended the process and freed its memory. detect: → the controller "
        "knows (negative: a survivor's broken connection spoke first). stop: → "
        "survivors at a safe point. decide: → resume step and replacement chosen (waits for a spare where none is "
        "warm). reset: → groups connected. restore: → state received and checked. resume: → first step completed, its "
        "own time not counted.",
        f"{ready} of {len(kills)} kills met a warm spare; {moved / 1e6:,.1f} MB of state went to the replacement.",
        "phases hit: " + ", ".join(_counted([str(kill["phase"]) for kill in kills])) + ".",
    ]
    return Section(title, ("part, ms", "median", "lower quartile", "upper quartile", "95th pct.", "max"), rows, notes)


def _five(values: list[float]) -> list[str]:
    """Returns median, quartiles, 95th percentile and maximum."""
    if not values:
        return ["-"] * 5
    found = np.quantile(values, [0.5, 0.25, 0.75, 0.95, 1.0])
    return [f"{value:,.1f}" for value in found]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _counted(words: list[str]) -> list[str]:
    return [f"{words.count(word)} × {word}" for word in dict.fromkeys(sorted(words))]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page as Markdown."""
    settings = result["settings"]
    size = f"{settings['size']} ({settings['parameters'] / 1e6:.1f} M parameters"
    job = f"""* Job: the GPT of examples/train_gpt.py, size {size},
  AdamW), batch {settings["batch_size"]} per rank, {settings["world_size"]} ranks and 1 spare, seed {settings["seed"]}.
"""
    head = heading("Recovery", result) + job + measured_in(result) + "\n"
    return head + "\n".join(section.markdown() for section in sections(result))
