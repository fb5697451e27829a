"""Measures the steps of a job in turns: alternating blocks of time under different conditions.

It compares neighbouring blocks, so that a machine that is slow for a while affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WATCHED = Path(__file__).with_name("train_watched.py")
"""The job's script. Each of its ranks writes a separate file."""
COSTS = {"time": "time altogether", "processor": "processor time", "waiting": "waiting for a core"}
"""Recorded figure of a step -> its title."""
MIN_STEPS = 3
"""A pair of blocks with fewer steps does not count."""
COLUMNS = ("of a step", "pairs", "a step without, ms", "more, % of a step", "with 95 %")
NOTE = (
    "more: the mean of a block with it less that of the block before it without, the median of all such pairs, in "
    "percent of a step. Bounds by order statistics. Waiting for a core: the training thread could have run, and "
    "another one did."
)

Pair = dict[str, float]
"""Means of each cost in microseconds: ``time_with_us``, ``time_without_us`` and so on."""


def steps_of(where: Path) -> np.ndarray:
    """Returns the records of rank 0 so far, shape [steps, 4]."""
    path = where / "steps-0"
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // 32 * 32], "<i8").reshape(-1, 4)


def pairs(steps: np.ndarray, turns: Sequence[tuple[int, str]], without: str) -> dict[str, list[Pair]]:
    """Returns for each condition its blocks, paired with the blocks before them.

    Args:
        steps: as `steps_of` returns them.
        turns: (begin of a block (monotonic, ns), its condition). The last entry only ends the block before it.
        without: the condition with which the others are compared, in every other block.
    """
    begins = np.array([at_ns for at_ns, _ in turns])
    costs = np.diff(steps[:, :3], axis=0) / 1e3
    block = np.searchsorted(begins, steps[1:, 0]) - 1
    is_whole = block == np.searchsorted(begins, steps[:-1, 0]) - 1
    inside = [costs[is_whole & (block == number)] for number in range(len(turns) - 1)]
    found: dict[str, list[Pair]] = {}
    for number in range(1, len(inside)):
        way = turns[number][1]
        if way == without or min(len(inside[number]), len(inside[number - 1])) < MIN_STEPS:
            continue
        means = {"with": inside[number].mean(axis=0), "without": inside[number - 1].mean(axis=0)}
        pair = {f"{name}_{side}_us": float(mean[i]) for side, mean in means.items() for i, name in enumerate(COSTS)}
        found.setdefault(way, []).append(pair)
    return found


def rows(measured: list[Pair]) -> list[list[str]]:
    """Returns for each cost a row of a table with `COLUMNS`."""
    step_us = statistics.median(pair["time_without_us"] for pair in measured)
    found = []
    for name, meaning in COSTS.items():
        more = sorted(100 * (pair[f"{name}_with_us"] - pair[f"{name}_without_us"]) / step_us for pair in measured)
        low, high = interval(more)
        figures = [f"{statistics.median(more):+.3f}", f"{low:+.3f} to {high:+.3f}"]
        found.append([meaning, str(len(more)), f"{step_us / 1000:.1f}", *figures])
    return found


def interval(ordered: list[float]) -> tuple[float, float]:
    """Returns the bounds of the median's 95 % interval, by order statistics."""
    reach = 0.98 * len(ordered) ** 0.5
    low = max(0, round(len(ordered) / 2 - reach) - 1)
    return ordered[low], ordered[len(ordered) - 1 - low]
