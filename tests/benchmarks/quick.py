"""Runs a benchmark as a smoke test, and reads the page that it writes."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 480


def measured(name: str, folder: Path, *flags: str) -> str:
    """The page of a small run, which is all that it writes into the folder."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(folder), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = folder.iterdir()
    assert path.suffix == ".md"
    return path.read_text(encoding="utf-8")


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table below a heading of a page: first the names of its columns, then its rows."""
    _, found, below = page.partition(f"\n## {title}\n\n")
    assert found, f"no table {title!r} in\n{page}"
    head, _, *rows = below.partition("\n\n")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")] for line in (head, *rows)
    ]
