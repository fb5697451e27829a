"""``keepstep status``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keepstep.launcher import control


def main(arguments: list[str]) -> int:
    """Prints where every worker of a running job is, and which places are in quarantine."""
    parser = argparse.ArgumentParser(prog="keepstep status", description="Shows the workers of a running job.")
    parser.add_argument("--run-dir", required=True, help="the folder given to 'keepstep run --run-dir'")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    status = control.ask(Path(chosen.run_dir))
    if chosen.json:
        print(json.dumps(status, indent=2))
        return 0
    recoveries = len(status["recoveries"])
    table = Table(title=f"{status['stage']}, generation {status['generation']}, {recoveries} recoveries")
    columns = ("rank", "role", "node", "pid", "generation", "step", "phase")
    for column in columns:
        table.add_column(column)
    for worker in status["workers"]:
        table.add_row(*("-" if worker[column] is None else str(worker[column]) for column in columns))
    console = Console()
    console.print(table)
    for place, why in status["quarantine"].items():
        console.print(f"in quarantine: {place} {why}", highlight=False)
    for place, why in status["closed_devices"].items():
        console.print(f"closed: {place}: {why}", highlight=False)
    if status["standstill"] is not None:
        console.print(status["standstill"], highlight=False, markup=False)
    return 0
