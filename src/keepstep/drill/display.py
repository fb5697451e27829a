"""What a drill shows: where every rank is while it runs, and the table at its end."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from keepstep.launcher.job import Job
from keepstep.protocol.recovery import Stage

REFRESH_S = 0.2
TABLE_COLUMNS = 100
PARTS = ("detect", "stop", "decide", "reset", "restore", "resume", "gap")


async def follow(title: str, job: Job) -> None:
    """Prints one line for each recovery as it happens, and on a terminal a line that shows every rank."""
    console = Console(stderr=True)
    console.print(f"[bold]run {title}[/bold]")
    told = 0
    while job.controller.machine.stage not in (Stage.FINISHED, Stage.ENDED):
        records = job.controller.machine.records
        for record in records[told:]:
            if record.resumed_s is None and not record.superseded:
                break
            told += 1
            gap = record.milliseconds()["gap"]
            text = f"took {gap:.0f} ms" if gap is not None else "was cut short by another failure"
            console.print(f"  [yellow]⚡[/yellow] {record.detail}: resumed at step {record.resume_step}, {text}")
        if console.is_terminal:
            places = "  ".join(
                f"{'spare' if worker['rank'] is None else worker['rank']}:{worker['phase']} {worker['step']}"
                for worker in job.agent.status()
            )
            console.print(places[: console.width - 1].ljust(console.width - 1), end="\r")
        await asyncio.sleep(REFRESH_S)


def show(result: dict[str, Any]) -> None:
    """Prints the table of a drill's result."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_COLUMNS)  # a file or a pipe has no width: do not fold the table
    table = Table(title="what failed, and what it cost", caption="detect ... gap: milliseconds", box=box.SIMPLE_HEAD)
    for column in ("fault", "rank", "phase", "resume", "again", *PARTS):
        table.add_column(column, justify="left" if column in ("fault", "phase") else "right", no_wrap=True)
    for row in result["faults"]:
        cells = [row["fault"], row["rank"], row["phase"], row["resume_step"], row["steps_recomputed"]]
        cells += [None if row[f"{part}_ms"] is None else f"{row[f'{part}_ms']:.1f}" for part in PARTS]
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    console.print(table)
    console.print("resume: the step that training went on from. again: steps computed again because of the failure.")
    console.print("gap: from the failure to the first completed step, that step's own compute included.")
    if result["step_ms"] is not None:
        console.print(f"a step without a failure takes {result['step_ms']:.1f} ms (median).")
    for fault in result["missed"]:
        console.print(f"[red]never came about:[/red] {fault} (are there enough steps?)")
    if result["exit_code"] != 0:
        console.print(
            f"[red]the run with failures ended with exit code {result['exit_code']}:[/red] {result['reason']}"
        )
    answer = "[bold green]yes[/bold green]" if result["identical"] else "[bold red]NO[/bold red]"
    console.print(f"weights identical: {answer}")
    console.print(f"  without failures  {result['reference_digest']}")
    console.print(f"  with failures     {result['digest']}")
