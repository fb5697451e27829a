"""Runs one drill, for `layouts.py`, `loops.py` and `compiled.py`."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs import JobFailed, RunningJob

DEADLINE_S = 300.0
"""Deadline of one drill."""


def drilled(name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs a drill, and returns its result.

    Args:
        name: the name of the training, for messages.
        arguments: the arguments of ``keepstep drill``.

    Raises:
        JobFailed: the weights or files differ, or the drill did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        found = Path(folder) / "drill.json"
        command = [sys.executable, "-m", "keepstep.cli.main", "drill", "--json", str(found), *arguments]
        with RunningJob(command, Path(folder)) as job:
            job.wait(DEADLINE_S)
        result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    struck = result["faults"]
    kills = [each for each in struck if each["fault"] != "hang"]
    different = [file["file"] for file in result["files"] if file["difference"]]
    if not result["identical"] or result["missed"] or different:
        raise JobFailed(
            f"{name}: identical: {result['identical']}, other files: {different}, never happened: {result['missed']}"
        )
    return {
        "num_faults": len(struck),
        "again": [each["steps_recomputed"] for each in struck],
        "state_from": sorted({each["state_from"] for each in struck}),
        "recovery_ms": [each["gap_ms"] - each["first_step_ms"] for each in kills],
        "gap_ms": [each["gap_ms"] for each in kills],
        "files": [file["file"] for file in result["files"]],
    }


def figures(result: dict[str, Any]) -> list[str]:
    """Returns two cells of a table: the greatest number of repeated steps, and the median recovery in milliseconds."""
    return [f"≤ {max(result['again'])}", f"{statistics.median(result['recovery_ms']):,.0f}"]
