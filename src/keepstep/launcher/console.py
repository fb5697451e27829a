"""What a running job tells its user: a line for each recovery, for each place in quarantine, for ranks that wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.protocol.recovery.ending import NOT_PROTECTED
from keepstep.trace.timeline.events import quarantine_text, recovery_text

REFRESH_S = 0.2
UNPROTECTED_S = 30.0
"""Imports may take so long. A script that has not called `keepstep.init()` by then probably never does."""
Places = Callable[[], list[dict[str, object]]]


async def follow(job: RecoveryMachine, places: Places | None = None) -> None:
    """Prints each recovery as it ends.

    Args:
        job: the machine that decides.
        places: where every worker is; given on a terminal, a line there shows it.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    told = len(job.records)  # those of a controller's former life have been told
    held = set(job.quarantine.held)
    unprotected_s = time.monotonic() + UNPROTECTED_S
    num_standstills = job.standstill.num_told
    while job.stage is not Stage.ENDED:
        records = job.records
        while told < len(records) and (records[told].resumed_s is not None or records[told].superseded):
            console.print(f"[yellow]keepstep:[/yellow] {recovery_text(records[told])}")
            told += 1
        for place in job.quarantine.held.keys() - held:
            console.print(f"[yellow]keepstep:[/yellow] {quarantine_text(place, job.quarantine.held[place])}")
        held = set(job.quarantine.held)
        if not job.progress.is_initialised and job.roster.num_holders and time.monotonic() > unprotected_s:
            console.print(f"[yellow]keepstep:[/yellow] {NOT_PROTECTED}")
            unprotected_s = math.inf
        if job.standstill.num_told > num_standstills:
            num_standstills = job.standstill.num_told
            console.print(f"[yellow]keepstep:[/yellow] {escape(job.standstill.told)}")
        if places is not None and console.is_terminal:
            _print_places(console, places())
        await asyncio.sleep(REFRESH_S)


def _print_places(console: Console, places: list[dict[str, object]]) -> None:
    line = "  ".join(
        f"{'spare' if worker['rank'] is None else worker['rank']}:{worker['phase']} {worker['step']}"
        for worker in places
    )
    console.print(line[: console.width - 1].ljust(console.width - 1), end="\r")
