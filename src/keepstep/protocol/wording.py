"""Words for ranks, and for what is said of them, in every sentence of the controller. Their length does not grow with
the job's."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.protocol.phases import Phase

MAX_RUNS = 8
"""Most runs of ranks that `who` lists."""
MAX_REASONS = 6
"""Most different things that `by_reason` says. With more, a line would not be readable."""
MAX_CHARACTERS = 400
"""Each of them is cut to this length if there are several."""


def who(ranks: Iterable[int]) -> str:
    """Returns ranks in words, for example: rank 0; ranks 1 and 2; ranks 0 to 5 and 7; ranks 0, 2, 4 and 37 more."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs[:MAX_RUNS]:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if left := sum(map(len, runs[MAX_RUNS:])):
        words.append(f"{left} more")
    if len(runs) == 1 and len(runs[0]) == 1:
        return f"rank {words[0]}"
    return f"ranks {words[0] if len(words) == 1 else ', '.join(words[:-1]) + ' and ' + words[-1]}"


def place_of(phase: Phase, step: int) -> str:
    """Returns where a rank is: in forward of step 7; after step 7; before the first step."""
    if phase is Phase.STARTING or step < 0:
        return "before the first step"
    if phase is Phase.UPDATED:
        return f"after step {step}"
    return f"in {phase} of step {step}"


def by_reason(said: Iterable[tuple[int, str]], *, what: str = "") -> str:
    """Returns what is said of ranks, with those together of which the same is said: the first few, and how many more.

    For example: rank 0 lost: killed by SIGKILL; ranks 8 to 15 lost: node b lost; and 37 more.

    Args:
        said: (rank, what is said of it), in the order of the sentence.
        what: stands between the ranks and what is said of them, for example " lost".
    """
    alike: dict[str, list[int]] = {}
    for rank, reason in said:
        alike.setdefault(reason, []).append(rank)
    if len(alike) == 1:
        ((reason, ranks),) = alike.items()
        return f"{who(ranks)}{what}: {reason}"
    first = list(alike.items())[:MAX_REASONS]
    parts = [f"{who(ranks)}{what}: {_cut(reason)}" for reason, ranks in first]
    if left := sum(map(len, alike.values())) - sum(len(ranks) for _, ranks in first):
        parts.append(f"and {left} more")
    return "; ".join(parts)


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_CHARACTERS else f"{reason[:MAX_CHARACTERS]} ..."
