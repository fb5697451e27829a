"""Console output of a running job: a line for each recovery, each quarantine, each notice, and for waiting ranks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

from keepstep.protocol.messages import printable
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.protocol.recovery.end.verdicts import NOT_PROTECTED
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.timeline.events import quarantine_text, recovery_text

REFRESH_S = 0.2
UNPROTECTED_S = 30.0
"""Imports may take this long. A script that has not called `keepstep.init()` by then probably never will."""
Places = Callable[[], list[dict[str, object]]]


async def follow(job: RecoveryMachine, places: Places | None = None) -> None:
    """Prints recoveries, quarantines and waiting ranks until the job ends.

    Args:
        job: the recovery machine of the job.
        places: returns the rank, phase and step of each worker. If given, a line on the terminal shows them.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    news = _news(job)
    unprotected_s = time.monotonic() + UNPROTECTED_S
    try:
        while job.stage is not Stage.ENDED:
            _print_news(console, news)
            if not job.progress.is_initialised and job.roster.num_holders and time.monotonic() > unprotected_s:
                console.print(f"[yellow]keepstep:[/yellow] {NOT_PROTECTED}")
                unprotected_s = math.inf
            if places is not None and console.is_terminal:
                _print_places(console, places())
            await asyncio.sleep(REFRESH_S)
    finally:
        _print_news(console, news)  # also if a signal has ended the job


def _print_news(console: Console, news: Iterator[str | None]) -> None:
    while (text := next(news)) is not None:
        console.print(f"[yellow]keepstep:[/yellow] {escape(printable(text))}")


def _news(job: RecoveryMachine) -> Iterator[str | None]:
    """Yields a text for each new event, then None, and repeats this without end.

    It skips the events before its first iteration: an earlier process of this controller has printed them.
    """
    num_told, held, num_standstills = len(job.records), set(job.quarantine.held), job.standstill.num_told
    num_notices = len(job.notices)
    while True:
        while num_notices < len(job.notices):
            num_notices += 1
            yield job.notices[num_notices - 1]
        while num_told < len(job.records) and _is_over(record := job.records[num_told]):
            num_told += 1
            if record.resume_step is not None:  # else all ranks were started again, and a notice has told it
                yield recovery_text(record)
        for place in job.quarantine.held.keys() - held:
            yield quarantine_text(place, job.quarantine.held[place])
        held = set(job.quarantine.held)
        if job.standstill.num_told > num_standstills:
            num_standstills = job.standstill.num_told
            yield job.standstill.told
        yield None


def _is_over(record: RecoveryRecord) -> bool:
    return record.resumed_s is not None or record.superseded


def _print_places(console: Console, places: list[dict[str, object]]) -> None:
    line = "  ".join(
        f"{'spare' if worker['rank'] is None else worker['rank']}:{worker['phase']} {worker['step']}"
        for worker in places
    )
    console.print(line[: console.width - 1].ljust(console.width - 1), end="\r")
