"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the folder of a run, or of a drill, as ``run``; `runfolder.newest_run` finds the run in it."""
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the run's folder: that given as --run-dir to 'keepstep run' or 'keepstep drill'",
    )
