"""``keepstep status``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.cli.arguments import add_run
from keepstep.errors import RemoteProtocolError
from keepstep.launcher import control
from keepstep.protocol.messages import printable
from keepstep.trace.record import phaselog, runfolder
from keepstep.trace.weights.publications import Publications, describe_publication, publication_text


def main(arguments: list[str]) -> int:
    """Prints the position of each worker of a running job, the published weights, and the nodes and devices in
    quarantine."""
    parser = argparse.ArgumentParser(prog="keepstep status", description="Shows the workers of a running job.")
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    folder = runfolder.newest_run(chosen.run)
    status = control.ask(folder)
    add_places(folder, status["workers"])
    now_s = runfolder.read_info(folder).clock().now_s()
    publications = Publications.read(folder / runfolder.WEIGHTS).found.values()
    status["weights"] = [describe_publication(each, now_s) for each in publications]
    if chosen.json:
        print(json.dumps(status, indent=2))
        return 0
    recoveries = len(status["recoveries"])
    table = Table(title=f"{status['stage']}, generation {status['generation']}, {recoveries} recoveries")
    columns = ("rank", "role", "node", "pid", "generation", "step", "phase")
    for column in columns:
        table.add_column(column)
    for worker in status["workers"]:
        table.add_row(*("-" if worker[column] is None else Text(printable(str(worker[column]))) for column in columns))
    console = Console()
    console.print(table)
    for place, why in status["quarantine"].items():
        console.print(printable(f"in quarantine: {place} {why}"), highlight=False, markup=False)
    for place, why in status["closed_devices"].items():
        console.print(printable(f"closed: {place}: {why}"), highlight=False, markup=False)
    for weights in status["weights"]:
        console.print(publication_text(weights), highlight=False, markup=False)
    if status["standstill"] is not None:
        console.print(printable(status["standstill"]), highlight=False, markup=False)
    return 0


def add_places(folder: Path, workers: list[dict[str, Any]]) -> None:
    """Adds the step and phase of workers from the phase log of a run, where the controller does not know them.

    The log may be a second old, and may lack a worker, or all if the disk was full.
    """
    unknown = {worker["worker"]: worker for worker in workers if worker["phase"] is None}
    try:
        found = phaselog.last_phases(folder / runfolder.PHASES, unknown)
    except (OSError, RemoteProtocolError) as error:
        print(f"keepstep status: no steps and phases: {printable(str(error))}", file=sys.stderr)
        return
    for number, (phase, step) in found.items():
        unknown[number] |= {"phase": phase, "step": step}
