"""A small set of faults with which a case still fails."""

from __future__ import annotations

import dataclasses
import itertools

from keepstep.sim.run import Case, Outcome, run

MAX_SUBSETS = 1_000
"""Each is a run of 10 to 30 ms, so this bounds the wait to about half a minute. Up to nine faults all subsets are tried
(511 smaller ones of nine); of ten there are 1,023."""


def shrink(outcome: Outcome) -> tuple[Case, tuple[int, ...]]:
    """Leaves faults away as long as the same check fails.

    First one after the other. What is left is a handful, of which subsets are tried, small ones first, up to
    `MAX_SUBSETS` of them: where there are more, a smaller set than the one found may exist.

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
    """The same case with some of its faults."""
    return dataclasses.replace(case, plan=tuple(case.plan[number] for number in kept))
