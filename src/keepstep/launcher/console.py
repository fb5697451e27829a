"""Console output of a job: recoveries, quarantines, notices, lost nodes, and ranks that wait; and how it has ended."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from keepstep.protocol.messages import printable
from keepstep.protocol.recovery import RecoveryMachine, Stage
from keepstep.protocol.recovery.end.verdicts import NOT_PROTECTED
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.trace.timeline.events import quarantine_text, recovery_text

REFRESH_S = 0.2
UNPROTECTED_S = 30.0
"""Imports may take this long, from the start of the ranks' processes. A script that has not called `keepstep.init()` by
then probably never will."""
Places = Callable[[], list[dict[str, object]]]


async def follow(job: RecoveryMachine, places: Places | None = None) -> None:
    """Prints the news of a job until it ends.

    Args:
        job: the recovery machine of the job.
        places: returns the rank, phase and step of each worker. If given, a line on the terminal shows them.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    news = _news(job)
    try:
        while job.stage is not Stage.ENDED:
            _print_news(console, news)
            if places is not None and console.is_terminal:
                _print_places(console, places())
            await asyncio.sleep(REFRESH_S)
    finally:
        _print_news(console, news)  # also if a signal has ended the job


def _print_news(console: Console, news: Iterator[str | None]) -> None:
    while (text := next(news)) is not None:
        console.print(f"[yellow]keepstep:[/yellow] {escape(printable(text))}")


def _news(job: RecoveryMachine, clock_s: Callable[[], float] = time.monotonic) -> Iterator[str | None]:
    """Yields a text for each new event, then None, and repeats this without end.

    It skips the events before its first iteration: an earlier process of this controller has printed them.
    """
    num_told, held = len(job.records), set(job.quarantine.held)
    lists = (job.node_news, job.notices)
    nums_printed, num_standstills = list(map(len, lists)), len(job.standstill.published)
    unprotected_s: float | None = None
    while True:
        if unprotected_s is None and _are_started(job):
            unprotected_s = clock_s() + UNPROTECTED_S
        if unprotected_s is not None and clock_s() > unprotected_s and not job.progress.is_initialised:
            unprotected_s = math.inf
            yield NOT_PROTECTED
        for index, sentences in enumerate(lists):
            while nums_printed[index] < len(sentences):
                nums_printed[index] += 1
                yield sentences[nums_printed[index] - 1]
        while num_told < len(job.records) and _is_over(record := job.records[num_told]):
            num_told += 1
            if record.resume_step is not None:  # else all ranks were started again, and a notice has told it
                yield recovery_text(record)
        for place in job.quarantine.held.keys() - held:
            yield quarantine_text(place, job.quarantine.held[place])
        held = set(job.quarantine.held)
        while num_standstills < len(job.standstill.published):
            num_standstills += 1
            yield job.standstill.published[num_standstills - 1]
        yield None


def _are_started(job: RecoveryMachine) -> bool:
    """Whether every rank has a process, so that its script runs."""
    holders = job.roster.holders()
    return len(holders) == job.settings.world_size and all(worker.pid is not None for worker in holders)


def _is_over(record: RecoveryRecord) -> bool:
    return record.resumed_s is not None or record.superseded


def tell_folder(run_dir: Path) -> None:
    """Prints how to look at a run that has ended, if its folder is still there."""
    if run_dir.exists():
        print(f"keepstep: to look at this run: keepstep dashboard {shlex.quote(str(run_dir))}", file=sys.stderr)


def tell_end(report: Mapping[str, Any]) -> None:
    """Prints what a job has done; or the reason of its end if it failed or never called ``init()``.

    Args:
        report: the job's report; of a run that had ended before, only its exit code and reason.
    """
    if report["exit_code"] != 0 or not report.get("initialised", True):
        print(f"keepstep: {printable(report['reason'])}", file=sys.stderr, flush=True)
    elif "steps" in report:
        print(f"keepstep: {closing_text(report)}", file=sys.stderr, flush=True)


def closing_text(report: Mapping[str, Any]) -> str:
    """Returns what a job has done in its steps and recoveries, such as "60 steps, 1 rank lost, recovered in 0.1 s"."""
    steps, lost = report["steps"], report["ranks_lost"]
    text = f"{steps:,} step{'' if steps == 1 else 's'}, {lost or 'no'} rank{'s' if lost > 1 else ''} lost"
    return f"{text}, recovered in {report['recovery_s']:.1f} s" if report["recovery_s"] else text


def _print_places(console: Console, places: list[dict[str, object]]) -> None:
    line = "  ".join(
        f"{'spare' if worker['rank'] is None else worker['rank']}:{worker['phase']} {worker['step']}"
        for worker in places
    )
    console.print(line[: console.width - 1].ljust(console.width - 1), end="\r")
