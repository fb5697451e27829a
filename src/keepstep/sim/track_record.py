"""Adds a row to the track record: a soak, its date, and its result."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

from keepstep.errors import ConfigurationError
from keepstep.sim.batch import Tally


def append_soak(path: Path, total: Tally, seconds: float, jobs: int) -> None:
    """Adds a row to the last table of a track record.

    Args:
        path: the page.
        total: the tally of all seeds.
        seconds: how long the soak took.
        jobs: number of processes.

    Raises:
        ConfigurationError: the file cannot be read, or does not end in a table.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigurationError(f"--track-record {path}: {error.strerror}") from error
    if not text.rstrip().splitlines() or not text.rstrip().splitlines()[-1].startswith("|"):
        raise ConfigurationError(f"--track-record {path}: it does not end in a table")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rate = total.num_failures / seconds * 3600 / jobs if seconds else 0.0
    seeds = ", ".join(str(failed.seed) for failed in total.failed[:10]) or "none"
    cells = (
        *(today, _commit(), f"{seconds:.0f}", str(jobs)),
        *(f"{total.num_seeds:,}", f"{total.num_failures:,}", f"{rate:,.0f}", seeds),
    )
    path.write_text(f"{text.rstrip()}\n| {' | '.join(cells)} |\n")


def _commit() -> str:
    """Returns the abbreviated hash of the current commit, with ``-dirty`` if there are uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
