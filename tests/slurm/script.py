"""The sbatch script of the examples, for a small job."""

from __future__ import annotations

import re
from pathlib import Path

from tests.network.cluster import PATIENT

SBATCH = Path(__file__).resolve().parent.parent.parent / "examples" / "slurm" / "train.sbatch"


def small_job(script: str, port: int, *flags: object) -> str:
    """Returns its text with one rank on each of two nodes, a spare on a third, and more flags for ``keepstep run``."""
    text = SBATCH.read_text()
    for line, instead in (
        (r"^rank_nodes=\S+", "rank_nodes=2"),
        (r"^ranks_per_node=\S+", "ranks_per_node=1"),
        (r"^spares=\S+", "spares=1"),
        (r"^script=\S+", f"script=({script})"),
        (r"^port=\S+ \+ .*\)\)", f"port={port}"),
        (r'--spares "\$spares"', " ".join(['--spares "$spares"', *map(str, (*PATIENT, *flags))])),
    ):
        text, count = re.subn(line, instead, text, flags=re.MULTILINE)
        assert count == 1, line
    return text
