"""What all of keepstep's programs do alike."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "keepstep"


def test_a_program_is_started_in_one_way_only() -> None:
    """So that it never takes a module of the working directory for one of the library."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"sys\.executable,", path.read_text())
    }
    # The second one tells a script what Python would have been started with.
    assert found == {"programs.py", "worker/process/bootstrap.py"}
