"""What a running job tells its user: one line for each recovery."""

from __future__ import annotations

import asyncio

from rich.console import Console

from keepstep.launcher.job import Job
from keepstep.protocol.recovery import Stage
from keepstep.trace.timeline.events import recovery_text

REFRESH_S = 0.2


async def follow(job: Job) -> None:
    """Prints each recovery as it ends; on a terminal with ``show_places``, also where every rank is."""
    await _follow(job, show_places=False)


async def follow_closely(job: Job) -> None:
    """As `follow`, and on a terminal a line that shows where every rank is."""
    await _follow(job, show_places=True)


async def _follow(job: Job, show_places: bool) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    told = 0
    while job.controller.job.stage not in (Stage.FINISHED, Stage.ENDED):
        records = job.controller.job.records
        while told < len(records) and (records[told].resumed_s is not None or records[told].superseded):
            console.print(f"[yellow]keepstep:[/yellow] {recovery_text(records[told])}")
            told += 1
        if show_places and console.is_terminal:
            _print_places(console, job)
        await asyncio.sleep(REFRESH_S)


def _print_places(console: Console, job: Job) -> None:
    places = "  ".join(
        f"{'spare' if worker['rank'] is None else worker['rank']}:{worker['phase']} {worker['step']}"
        for worker in job.agent.status()
    )
    console.print(places[: console.width - 1].ljust(console.width - 1), end="\r")
