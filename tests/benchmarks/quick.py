"""Runs a benchmark as a smoke test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 300


def measured(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The figures and the page of a small run."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = folder.glob(f"*-{name}.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()
