"""The smallest set of faults with which a case still fails."""

from __future__ import annotations

import dataclasses
import itertools

from keepstep.sim.run import Case, Outcome, run


def shrink(outcome: Outcome) -> tuple[Case, tuple[int, ...]]:
    """Leaves faults away as long as the same check fails.

    A plan has a handful of faults, so all subsets are tried, small ones first: what is found is the smallest.

    Returns:
        the case, and the numbers of its faults in the plan of the seed.
    """
    plan = outcome.case.plan
    for size in range(len(plan)):
        for kept in itertools.combinations(range(len(plan)), size):
            case = with_faults(outcome.case, kept)
            if run(case).check is outcome.check:
                return case, kept
    return outcome.case, tuple(range(len(plan)))


def with_faults(case: Case, kept: tuple[int, ...]) -> Case:
    """The same case with some of its faults."""
    return dataclasses.replace(case, plan=tuple(case.plan[number] for number in kept))
