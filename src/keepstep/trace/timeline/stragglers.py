"""Stragglers: ranks that do not fail, but whose phases repeatedly take longer than those of the others.

In synchronous training all ranks wait for the slowest, so a rank's *waiting* time says nothing about it. Only the
rank's own time in a phase counts: for a backward, until it has begun its last collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PHASES
from keepstep.trace.timeline.pace import DurationArray

WINDOW = 32
"""Number of recent steps that are compared, because a single slow step does not make a straggler."""
MIN_STEPS = 8
RATIO = 1.25
"""First condition: a straggler takes at least a quarter longer than the others, so all ranks lose that much time."""
DEVIATIONS = 4.0
"""Second condition: it is this many standard deviations above the others. Of normally distributed times, one in 16,000
is that far from the mean."""
MAD_TO_SIGMA = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""
STEP_SHARE = 0.05
"""Third condition: it delays the others by at least this share of a step. Otherwise very short phases would count."""

_JUDGED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.UPDATED)
_COLUMN = {PHASES.index(phase): column for column, phase in enumerate(_JUDGED)}
NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.UPDATED: "between steps",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow in one phase. Times are medians over the window, in milliseconds."""

    rank: int
    phase: str
    own_ms: float
    typical_ms: float

    @property
    def ratio(self) -> float:
        """The rank's own time divided by that of the others."""
        return self.own_ms / self.typical_ms if self.typical_ms else float("inf")


class StragglerWatch:
    """Keeps the own times of the last steps and finds stragglers."""

    def __init__(self, world_size: int) -> None:
        shape = (world_size, len(_JUDGED))
        self._own_ns = np.full((*shape, WINDOW), np.nan)
        self._counts = np.zeros(shape, np.int64)
        self._worker = np.full(world_size, -1)

    def take(self, durations: DurationArray) -> None:
        """Adds the durations of ended phases."""
        columns = np.array([_COLUMN.get(phase, -1) for phase in range(len(PHASES))])[durations["phase"]]
        judged = (columns >= 0) & (durations["rank"] < len(self._worker))
        durations, columns = durations[judged], columns[judged]
        ranks = durations["rank"]
        self._forget_predecessors(ranks, durations["worker"])
        places = ranks * len(_JUDGED) + columns
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        firsts = np.searchsorted(sorted_places, sorted_places)  # first index of the same rank and phase
        turns = np.arange(len(order)) - firsts
        counts = self._counts.reshape(-1)
        slots = (counts[sorted_places] + turns) % WINDOW
        self._own_ns.reshape(-1, WINDOW)[sorted_places, slots] = durations["own_ns"][order]
        np.add.at(counts, places, 1)

    def _forget_predecessors(self, ranks: np.ndarray, workers: np.ndarray) -> None:
        """Discards the times of a rank's former worker when another worker holds the rank."""
        changed = np.unique(ranks[self._worker[ranks] != workers])
        self._own_ns[changed] = np.nan
        self._counts[changed] = 0
        self._worker[ranks] = workers

    def medians_ms(self, ranks: Sequence[int]) -> NDArray[np.float64]:
        """Returns the ranks' own times in the phases, as medians over the window; nan if there are none.

        Returns:
            Shape [ranks, phases], with the phases in the order of `NAMES`.
        """
        own_ns = self._own_ns[np.array(ranks, np.intp)]
        is_empty = np.isnan(own_ns).all(axis=2)
        own_ns[is_empty] = 0.0
        medians = np.nanmedian(own_ns, axis=2) / 1e6
        medians[is_empty] = np.nan
        return np.asarray(medians, np.float64)

    def found(self) -> list[Straggler]:
        """Returns the current stragglers, the slowest first."""
        enough = (self._counts >= MIN_STEPS).all(axis=1)
        ranks = np.flatnonzero(enough)
        if len(ranks) < 2:
            return []
        medians = np.nanmedian(self._own_ns[ranks], axis=2)  # by rank and phase
        # Two ranks have no majority: the slower one is compared with the faster one.
        typical = medians.min(axis=0) if len(ranks) == 2 else np.median(medians, axis=0)
        spread = np.zeros(len(_JUDGED))
        if len(ranks) > 2:
            spread = np.median(np.abs(medians - typical), axis=0) * MAD_TO_SIGMA
        least = np.maximum((RATIO - 1) * typical, DEVIATIONS * spread)
        least = typical + np.maximum(least, STEP_SHARE * typical.sum())
        stragglers = []
        for at, column in np.argwhere(medians > least):
            own_ms, typical_ms = (round(float(ns) / 1e6, 3) for ns in (medians[at, column], typical[column]))
            stragglers.append(Straggler(int(ranks[at]), NAMES[_JUDGED[column]], own_ms, typical_ms))
        return sorted(stragglers, key=lambda each: each.typical_ms - each.own_ms)
