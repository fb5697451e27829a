"""``keepstep trace`` and ``keepstep report``: views of a run's folder, during or after the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.dashboard.report import html_report
from keepstep.errors import ConfigurationError
from keepstep.trace.pictures.chrome import write_trace
from keepstep.trace.pictures.drawing import Picture
from keepstep.trace.pictures.recovery import draw_recovery
from keepstep.trace.pictures.update import draw_last_update
from keepstep.trace.targets import check_target, replacing, write_whole
from keepstep.trace.timeline.run import Run, opened


def trace(arguments: list[str]) -> int:
    """Draws a recovery, or writes a trace of the whole run."""
    parser = argparse.ArgumentParser(prog="keepstep trace", description="Pictures and traces of a run.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    draw = commands.add_parser("draw", help="draw one recovery or one update of published weights, to scale")
    _add_run(draw)
    what = draw.add_mutually_exclusive_group()
    what.add_argument("--recovery", type=int, metavar="N", help="its number, from 1 on (default: the last one)")
    what.add_argument("--weights", metavar="FOLDER", help="draw the last update of the weights published there instead")
    draw.add_argument("-o", "--output", default="recovery.svg", help="an .svg file (default: %(default)s)")
    export = commands.add_parser("export", help="write a trace for Perfetto or chrome://tracing")
    _add_run(export)
    export.add_argument("-o", "--output", default="trace.json", help="the file to write (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    target = check_target("--output", Path(chosen.output))
    if chosen.command == "draw":
        _draw(Path(chosen.run), chosen.recovery, chosen.weights, target)
    else:
        with opened(Path(chosen.run)) as run, replacing(target) as file:
            write_trace(run, file)
    print(target)
    return 0


def report(arguments: list[str]) -> int:
    """Writes the report of a run."""
    parser = argparse.ArgumentParser(
        prog="keepstep report", description="Writes a page about a run: one file that needs nothing else."
    )
    _add_run(parser)
    parser.add_argument("-o", "--output", default="report.html", help="the file to write (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    target = check_target("--output", Path(chosen.output))
    with opened(Path(chosen.run)) as run:
        write_whole(target, html_report(run).encode())
    print(target)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="the folder given as --run-dir to 'keepstep run' or 'keepstep drill'"
    )


def _draw(folder: Path, number: int | None, weights: str | None, target: Path) -> None:
    if target.suffix != ".svg":
        raise ConfigurationError(f"--output {target}: the name must end with .svg")
    with opened(folder) as run:
        if weights is not None:
            write_whole(target, _picture_of(run, weights).svg().encode())
            return
        num = len(run.scenes)
        if not num:
            raise ConfigurationError(f"{run.folder}: nothing failed in this run, so there is no recovery to draw")
        number = num if number is None else number
        if not 1 <= number <= num:
            raise ConfigurationError(f"--recovery {number}: the run has {num}, so 1 to {num} are allowed")
        picture = draw_recovery(run, number)
    write_whole(target, picture.svg().encode())


def _picture_of(run: Run, folder: str) -> Picture:
    """Draws the last update of the weights published in a folder."""
    publication = run.publications.found.get(folder)
    if publication is None:
        known = ", ".join(run.publications.found) or "nothing"
        raise ConfigurationError(f"--weights {folder}: this run has not published there; it has in: {known}")
    if not any(device.spans for device in publication.last_devices.values()):
        raise ConfigurationError(f"--weights {folder}: no update has moved anything yet")
    return draw_last_update(publication)
