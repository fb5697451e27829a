"""The drill of each layout on four ranks: the script, its options, and how many steps it may recompute."""

from __future__ import annotations

import re
from pathlib import Path

from tests.worker.constructs import pipelines, training

from keepstep.drill.faults import IN_A_STEP

SCRIPT = Path(__file__).parents[1] / "scripts" / "constructs.py"
LAYOUTS = tuple(training.CONSTRUCTS | pipelines.CONSTRUCTS)
"""The names in docs/upstream.md."""
AT_RANDOM = ("FSDP2", "HSDP 2 × 2", "TP × DP 2 × 2, gradients averaged by the script")
"""Layouts whose ranks are also killed at random times."""
NUM_RANKS = 4
SPACING = 4
"""Steps from one fault to the next."""
SNAPSHOT_EVERY = 2
_REPLICATED = ("DDP", "HSDP", "TP × DP", "PP × DP", "EP × DP")


def short(layout: str) -> str:
    """Returns the layout's name in letters, digits and dashes."""
    return "-".join(re.findall(r"\w+", layout.replace("×", "x")))


def has_replicas(layout: str) -> bool:
    """Returns whether two ranks hold each shard."""
    return layout.startswith(_REPLICATED)


def most_again(layout: str) -> int:
    """Returns how many steps may be recomputed after a fault: the interrupted one, and without replicas also those
    since the snapshot."""
    return 1 if has_replicas(layout) else 1 + SNAPSHOT_EVERY


def in_every_phase(num_ranks: int = NUM_RANKS) -> tuple[str, int]:
    """Returns the faults, a kill in each phase and a hang, and the number of steps that they take."""
    faults = [f"kill@step={3 + n * SPACING},phase={phase},rank={n % num_ranks}" for n, phase in enumerate(IN_A_STEP)]
    faults.append(f"hang@step={3 + len(faults) * SPACING},phase=backward,rank={num_ranks // 2}")
    return ";".join(faults), 3 + len(faults) * SPACING


def at_random(count: int, seed: int) -> tuple[str, int]:
    """Returns kills at random times, and the number of steps that they take."""
    return f"kill@phase=random,count={count},seed={seed}", 10 * count + 30


def arguments(layout: str, spares: int, faults: tuple[str, int]) -> list[str]:
    """Returns the arguments of ``keepstep drill``."""
    script = [str(SCRIPT), layout, "--steps", str(faults[1])]
    if not has_replicas(layout):
        script += ["--snapshot-every", str(SNAPSHOT_EVERY)]
    return ["--nproc-per-node", str(NUM_RANKS), "--spares", str(spares), "--faults", faults[0], *script]
