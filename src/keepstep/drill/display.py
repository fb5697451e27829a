"""The output of a drill: the current run, and the table at the end."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keepstep.drill.drill import Drill
from keepstep.launcher.console import follow as follow_job
from keepstep.launcher.job import Job
from keepstep.protocol.deadlines import DEADLINES, Deadlines
from keepstep.protocol.recovery.records import Origin, Warmth
from keepstep.trace.timeline.describe import PARTS

TABLE_COLUMNS = 116


def introduce(drill: Drill, deadlines: Deadlines) -> None:
    """Prints what the drill is going to do, and after which time it takes a silent rank for a hanging one."""
    how = "both times without failures"
    if drill.is_weather:
        how = "once undisturbed and once with pauses that may cost it no rank"
    elif drill.faults is None:
        how = "once without failures and once with a fault in every phase of a step injected into its processes"
    elif drill.faults:
        faults = f"{len(drill.faults)} fault{'s' if len(drill.faults) != 1 else ''}"
        how = f"once without failures and once with {faults} injected into its processes"
    Console(stderr=True).print(
        f"keepstep drill: the job runs twice, {how}. Then every bit of the trained state is compared.\n"
        f"Here a rank hangs after {deadlines.hang_after_s:g} s without progress, or {deadlines.hang_factor:g} times "
        f"its longest recent phase; under keepstep run after {DEADLINES.hang_after_s:g} s (--hang-after).",
        highlight=False,
    )


async def follow(title: str, job: Job) -> None:
    """Prints which run this is, then its recoveries until it ends."""
    Console(stderr=True).print(f"[bold]run {title}[/bold]")
    await follow_job(job.controller.job, job.agent.status)


def show(result: dict[str, Any]) -> None:
    """Prints the result of a drill."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_COLUMNS)  # do not wrap the table in a file or a pipe
    if result["faults"]:
        _show_faults(console, result["faults"])
    if result["step_ms"] is not None:
        console.print(f"a step without a failure takes {result['step_ms']:.1f} ms (median).")
    for fault in result["missed"]:
        console.print(f"[red]never happened:[/red] {fault} (are there enough steps?)")
    for loss in result["raised"]:
        console.print("[red]lost by an exception that no fault has raised:[/red]", end=" ")
        console.print(loss, markup=False, highlight=False)
    if result["disturbed"] == []:
        console.print("no pause has cost the job a rank.")
    for loss in result["disturbed"] or ():
        console.print("[red]a pause that is nobody's fault has cost a recovery:[/red]", end=" ")
        console.print(loss, markup=False, highlight=False)
    if result["exit_code"] != 0:
        console.print(f"[red]the second run ended with exit code {result['exit_code']}:[/red] {result['reason']}")
    for line in result["log"]:
        console.print(line, markup=False, soft_wrap=True)
    answer = "[bold green]yes[/bold green]" if result["identical"] else "[bold red]NO[/bold red]"
    console.print(f"weights identical: {answer}")
    is_repeat = not result["faults"] and not result["missed"]
    console.print(f"  {'the first run' if is_repeat else 'without failures':<16}  {result['reference_digest']}")
    console.print(f"  {'the second run' if is_repeat else 'with failures':<16}  {result['digest']}")
    if result["nan"]:
        first, *others = result["nan"]
        more = f" and {len(others)} more" if others else ""
        console.print(f"[yellow]NaN after the last step:[/yellow] {escape(first)}{more}.", end=" ")
        console.print("Whatever is computed from NaN is NaN, so equal weights prove little.")
    for sentence in result["explanation"]["text"] if result["explanation"] else ():
        console.print(sentence, markup=False, soft_wrap=True)
    _show_files(console, result["files"])


def _show_faults(console: Console, rows: list[dict[str, Any]]) -> None:
    tells_origin = any(row["state_from"] not in (None, Origin.REPLICA) for row in rows)
    tells_own = any(row["framework_step"] is not None for row in rows)
    tells_warmth = any(row["spare"] not in (None, Warmth.WARM) for row in rows)
    further = (*(("state",) if tells_origin else ()), *(("spare",) if tells_warmth else ()))
    titles = ["fault", "rank", "phase", "resume", "again", *further, *PARTS]
    lines = []
    for row in rows:
        resume = row["resume_step"]
        if resume is not None and row["framework_step"] is not None:
            resume = f"{resume} ({row['framework_step']})"
        cells = [row["fault"], row["rank"], row["phase"], resume, row["steps_recomputed"]]
        cells += [row["state_from"] and row["state_from"].removesuffix(" in memory")] if tells_origin else []
        cells += [row["spare"]] if tells_warmth else []
        cells += [None if row[f"{part}_ms"] is None else f"{row[f'{part}_ms']:.1f}" for part in PARTS]
        lines.append(["-" if cell is None else str(cell) for cell in cells])
    whole = _table(titles, lines)
    if console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(whole)
    else:
        at = len(titles) - len(PARTS)
        console.print(_table(titles[:at], [line[:at] for line in lines], ""))
        console.print(_table(titles[:2] + titles[at:], [line[:2] + line[at:] for line in lines]))
    console.print("resume: the step at which training resumed. again: steps recomputed because of the failure.")
    if tells_own:
        console.print("In brackets: the last step before that one, as the framework counts.")
    if tells_origin:
        console.print("state: where that of the rank came from. snapshot: of this rank, in the memory of its node.")
    if tells_warmth:
        console.print("spare: warm, waiting at its first step. half-warm: waiting for")
        console.print("a rank. cold: started after the failure.")
    console.print("gap: from the failure to the first completed step, that step's own compute included.")


def _table(titles: list[str], lines: list[list[str]], caption: str = "detect ... gap: milliseconds") -> Table:
    table = Table(title="failures and their cost", caption=caption, box=box.SIMPLE_HEAD)
    for title in titles:
        is_text = title in ("fault", "phase", "state", "spare")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _show_files(console: Console, files: list[dict[str, Any]]) -> None:
    if not files:
        return
    different = [file for file in files if file["difference"] is not None]
    answer = "[bold red]NO[/bold red]" if different else "[bold green]yes[/bold green]"
    console.print(f"files identical: {answer} ({len(files) - len(different)} of {len(files)})")
    for file in different:
        console.print(f"  {file['file']}: {file['difference']}", markup=False, soft_wrap=True)
