"""What a drill of each layout on four ranks is: the script, its options, and how many steps may come again."""

from __future__ import annotations

import re
from pathlib import Path

from tests.worker.constructs import pipelines, training

from keepstep.drill.faults import IN_A_STEP

SCRIPT = Path(__file__).parents[1] / "scripts" / "constructs.py"
LAYOUTS = tuple(training.CONSTRUCTS | pipelines.CONSTRUCTS)
"""The names that docs/upstream.md has."""
AT_RANDOM = ("FSDP2", "HSDP 2 × 2", "TP × DP 2 × 2, gradients averaged by the script")
"""Those that are struck at random instants as well."""
NUM_RANKS = 4
SPACING = 4
"""Steps from one fault to the next."""
SNAPSHOT_EVERY = 2
_REPLICATED = ("DDP", "HSDP", "TP × DP", "PP × DP", "EP × DP")


def short(layout: str) -> str:
    """Its name in letters, digits and dashes."""
    return "-".join(re.findall(r"\w+", layout.replace("×", "x")))


def has_replicas(layout: str) -> bool:
    """Whether each shard is held by two ranks."""
    return layout.startswith(_REPLICATED)


def most_again(layout: str) -> int:
    """How many steps may come again after a fault: of replicas the broken one, else those since the snapshot, too."""
    return 1 if has_replicas(layout) else 1 + SNAPSHOT_EVERY


def in_every_phase(num_ranks: int = NUM_RANKS) -> tuple[str, int]:
    """A kill in each phase, and a hang; and how many steps that takes."""
    faults = [f"kill@step={3 + n * SPACING},phase={phase},rank={n % num_ranks}" for n, phase in enumerate(IN_A_STEP)]
    faults.append(f"hang@step={3 + len(faults) * SPACING},phase=backward,rank={num_ranks // 2}")
    return ";".join(faults), 3 + len(faults) * SPACING


def at_random(count: int, seed: int) -> tuple[str, int]:
    """Kills at random instants, and how many steps they take."""
    return f"kill@phase=random,count={count},seed={seed}", 10 * count + 30


def arguments(layout: str, spares: int, faults: tuple[str, int]) -> list[str]:
    """What comes after ``keepstep drill``."""
    script = [str(SCRIPT), layout, "--steps", str(faults[1])]
    if not has_replicas(layout):
        script += ["--snapshot-every", str(SNAPSHOT_EVERY)]
    return ["--nproc-per-node", str(NUM_RANKS), "--spares", str(spares), "--faults", faults[0], *script]
