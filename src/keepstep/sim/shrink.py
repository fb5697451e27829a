"""Finds a small set of faults with which a case still fails."""

from __future__ import annotations

import dataclasses
import itertools

from keepstep.sim.run import Case, Outcome, run

MAX_SUBSETS = 1_000
"""Each is a run of 10 to 30 ms, so this bounds the search to about half a minute. It allows all subsets of up to nine
faults (511 smaller ones of nine); ten have 1,023."""


def shrink(outcome: Outcome) -> tuple[Case, tuple[int, ...]]:
    """Removes faults as long as the same check fails.

    First it removes them one after the other. Of the few that remain it tries the subsets, small ones first, up to
    `MAX_SUBSETS` of them. If there are more subsets, a smaller set than the one found may exist.

    Returns:
        the case, and the numbers of its faults in the plan of the seed.
    """
    kept = tuple(range(len(outcome.case.plan)))
    for number in reversed(kept):
        without = tuple(other for other in kept if other != number)
        if _still_fails(outcome, without):
            kept = without
    fewer = (subset for size in range(len(kept)) for subset in itertools.combinations(kept, size))
    kept = next((subset for subset in itertools.islice(fewer, MAX_SUBSETS) if _still_fails(outcome, subset)), kept)
    return with_faults(outcome.case, kept), kept


def _still_fails(outcome: Outcome, kept: tuple[int, ...]) -> bool:
    return run(with_faults(outcome.case, kept)).check is outcome.check


def with_faults(case: Case, kept: tuple[int, ...]) -> Case:
    """Returns the same case with only the faults of these numbers."""
    return dataclasses.replace(case, plan=tuple(case.plan[number] for number in kept))
