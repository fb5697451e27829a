"""``keepstep trace`` and ``keepstep report``: views of a run's folder, during or after the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.cli.arguments import add_run
from keepstep.dashboard.report import html_report
from keepstep.trace.perfetto import write_trace
from keepstep.trace.targets import check_target, replacing, write_whole
from keepstep.trace.timeline.run import opened


def trace(arguments: list[str]) -> int:
    """Writes a trace of a run."""
    parser = argparse.ArgumentParser(prog="keepstep trace", description="Traces of a run.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    export = commands.add_parser("export", help="write a trace for Perfetto or chrome://tracing")
    add_run(export)
    export.add_argument("-o", "--output", default="trace.json", help="the file to write (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    target = check_target("--output", Path(chosen.output))
    with opened(chosen.run) as run, replacing(target) as file:
        write_trace(run, file)
    print(target)
    return 0


def report(arguments: list[str]) -> int:
    """Writes the report of a run."""
    parser = argparse.ArgumentParser(
        prog="keepstep report", description="Writes a page about a run: one file that needs nothing else."
    )
    add_run(parser)
    parser.add_argument("-o", "--output", default="report.html", help="the file to write (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    target = check_target("--output", Path(chosen.output))
    with opened(chosen.run) as run:
        write_whole(target, html_report(run).encode())
    print(target)
    return 0
