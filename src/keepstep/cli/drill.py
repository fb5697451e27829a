"""``keepstep drill``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keepstep.cli.dashboard import showing
from keepstep.dashboard.report import html_report
from keepstep.drill import display
from keepstep.drill.drill import Drill, is_good, run_drill
from keepstep.drill.faults import parse
from keepstep.drill.workdir import check_patterns
from keepstep.launcher.flags import job_options, make_parser, parse_flags
from keepstep.launcher.job import temporary_folder
from keepstep.launcher.recording import make_folder
from keepstep.systemcalls import check_locks
from keepstep.trace.targets import check_target, write_whole
from keepstep.trace.timeline.describe import as_json
from keepstep.trace.timeline.run import opened

HANG_AFTER = "1"
"""A drill finds hangs sooner than a job by default, so that a fault that stops a process costs seconds. If it takes a
slow rank for a hanging one on a busy machine, that is one more recovery, after which the weights must be the same."""

TO_FILES = "3"
"""The value of torchrun's ``--redirects`` that sends both streams of all ranks to their log files."""


def main(arguments: list[str]) -> int:
    """Runs a drill. Returns 0 only if the state and the compared files are identical and every fault was injected."""
    parser = _parser()
    chosen = parse_flags(parser, arguments)
    if chosen.quiet:
        chosen.redirects = TO_FILES
    # Each of the two runs gets its own folder below the drill's later on.
    options = job_options(chosen, temporary_folder() if chosen.run_dir is None else Path(chosen.run_dir))
    options = dataclasses.replace(options, keep_run_dir=chosen.run_dir is not None)
    world_size = options.recovery.world_size
    faults = parse(chosen.faults, world_size) if chosen.faults is not None else None
    drill = Drill(faults, chosen.weather, patterns=check_patterns(chosen.compare), awaits_spares=not chosen.strike_cold)
    json = check_target("--json", Path(chosen.json)) if chosen.json else None
    html = check_target("--html", Path(chosen.html)) if chosen.html else None
    with _folder(chosen.run_dir) as folder, showing(folder, chosen.dashboard):
        display.introduce(drill, options.recovery.deadlines)
        result = run_drill(options, drill, display.follow, folder)
        display.show(result)
        if json is not None:
            write_whole(json, as_json(result))
        if html is not None:
            with opened(folder / drill.second) as run:
                write_whole(html, html_report(run).encode())
    return 0 if is_good(result) else 1


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("keepstep drill")
    parser.description = "Runs a job without and with failures and compares all protected state, bit for bit."
    parser.set_defaults(hang_after=HANG_AFTER)
    own = parser.add_argument_group("drill")
    strikes = own.add_mutually_exclusive_group()
    strikes.add_argument(
        "--faults",
        help="what fails, such as 'kill@step=7,phase=backward,rank=1; hang@...', or "
        "none (default: one kill in each phase, and a late one whose replacement is slow)",
    )
    strikes.add_argument(
        "--weather",
        action="store_true",
        help="pauses of one rank, several and all of them instead of faults: none may cost the job a rank",
    )
    own.add_argument(
        "--strike-cold",
        action="store_true",
        help="do not wait for a warm spare before a fault: the recovery has to start a process, or wait for one",
    )
    own.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="PATTERN",
        help="compare these files as well, such as 'out/*.pt'; each run then has a working directory of its own, with "
        "links to what is in this one (may be given several times)",
    )
    own.add_argument(
        "--quiet",
        action="store_true",
        help="as --redirects 3: what the script prints goes to logs/ in the folder of each run, and the last lines are "
        "printed if a run does not reach its end",
    )
    own.add_argument("--json", help="write the result to this file")
    own.add_argument("--html", help="write a page about the run with failures to this file")
    return parser


@contextlib.contextmanager
def _folder(name: str | None) -> Iterator[Path]:
    """Yields the folder for both runs: the named one, or a temporary one that is removed after the drill."""
    if name is not None:
        yield make_folder("--run-dir", Path(name), 0o700)
        return
    with tempfile.TemporaryDirectory(prefix="keepstep-drill-") as folder:
        yield check_locks(Path(folder))
