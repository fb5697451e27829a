"""Explains why a drill prints NO: the first step, values and ranks that differ, the fault before, and a likely cause.

Both runs have recorded each rank's state at the start of each step (`keepstep.drill.records`). If the state differs at
the resume step, it was not restored correctly; if it differs only a step later, it was computed from something that is
not protected. If it differs before any fault, the script is not deterministic.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keepstep.drill.records import States, StepState

NAMES_SHOWN = 3
"""How many names of differing values the text shows; the JSON result has all."""


ROUNDING = 64.0
"""A tensor that differs by less than this multiple of its norm and its dtype's resolution differs by rounding: terms of
a gradient cancel, so it may differ by much more than its last bit."""


class Kind(enum.StrEnum):
    """The likely cause of a difference."""

    BEGAN = "began differently"
    BEGAN_LATER = "began at a later step"
    RANKS = "ranks differ without a failure"
    SCRIPT = "script not deterministic"
    RESUMED = "resumed from another state"
    COMPUTED = "computed differently"
    ROUNDED = "rounded differently"
    UNRECORDED = "a state_dict() differs, and no record of keepstep's"
    UNFINISHED = "steps not iterated to their end"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which states differ."""

    step: int
    """The step; the states are those at its start."""
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    """Names of the values that differ on any of the ranks."""
    at_s: float
    """When the second run recorded the first of these states, in monotonic seconds."""
    by: float | None = None
    """By how much the tensors differ at most; see `StepState.differs_by`. None: a value is no tensor of numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Why a drill prints NO, or what makes its yes worth little.

    ``fault`` is the specification of the last fault before the difference.
    """

    kind: Kind
    sentences: tuple[str, ...]
    difference: Difference | None = None
    fault: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the explanation in the form of ``--json``."""
        found = self.difference
        return {
            "kind": str(self.kind),
            "step": found.step if found else None,
            "ranks": list(found.ranks) if found else [],
            "names": list(found.names) if found else [],
            "fault": self.fault,
            "text": list(self.sentences),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedRun:
    """The data of one of the two runs that an explanation needs."""

    states: States
    digests: Mapping[str, str]
    """Rank -> digest of its state after the last step; empty if not all ranks completed that step."""
    reason: str = ""
    """Why the run ended."""
    shards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rank -> number of its shard; empty if all ranks hold the same shard."""

    @property
    def first_step(self) -> int | None:
        """The step at which it began; None if no rank began one."""
        return min((step for steps in self.states.values() for step in steps), default=None)

    def replicas(self) -> list[States]:
        """Returns the states for each shard, by rank."""
        found: dict[int, States] = {}
        for rank, steps in self.states.items():
            found.setdefault(self.shards.get(str(rank), 0), {})[rank] = steps
        return list(found.values())


def explain(first: RecordedRun, second: RecordedRun, faults: Sequence[Mapping[str, Any]]) -> Explanation:
    """Explains why two runs do not have the same weights.

    Args:
        first: the run without failures.
        second: the run with failures, or another one without.
        faults: the faults of the second run in order of time, as rows of the drill's result; may be empty.
    """
    for replicas in first.replicas():
        if len({first.digests.get(str(rank)) for rank in replicas}) > 1 and (found := first_disagreement(replicas)):
            return _ranks_differ(found, replicas)
    found = first_difference(first.states, second.states)
    if found is None:
        return _no_difference(second)
    before = [row for row in faults if row["at_s"] <= found.at_s]
    where = f"first difference: {_where(found, first.states)}, in {_some_of(found.names)}"
    if not before and found.step == min(min(steps) for steps in first.states.values()):
        return Explanation(
            Kind.BEGAN,
            (
                where,
                "The two runs started differently: does the script load weights? Is its start seeded, on each rank?",
            ),
            found,
        )
    if not before:
        return Explanation(Kind.SCRIPT, (where, *_not_deterministic(found.step, len(faults))), found)
    return _after_fault(where, found, before[-1])


def began_later(first: RecordedRun, second: RecordedRun) -> Explanation | None:
    """Explains a second run that began at a later step than the first one, even if their weights are the same."""
    one, other = first.first_step, second.first_step
    if one is None or other is None or one >= other:
        return None
    text = (
        f"The second run began at step {other}, and the first one at step {one}, because it loaded files that the "
        "first one wrote. Give --compare with a pattern of them: each run then has a working directory of its own."
    )
    return Explanation(Kind.BEGAN_LATER, (text,))


def unrecorded(difference: str) -> Explanation:
    """Explains two runs whose records and digests are equal, while what torch has saved of their ranks is not."""
    text = (
        f"What torch saves of the ranks' objects after the last step differs: {difference}. All that keepstep takes "
        "for their state is the same: please report this"
    )
    return Explanation(Kind.UNRECORDED, (text,))


def first_difference(first: States, second: States) -> Difference | None:
    """Returns the first step that a rank began from different states in the two runs; None if there is none."""
    for step in _steps_of(second):
        here = {
            rank: steps[step].differing(second[rank][step])
            for rank, steps in first.items()
            if step in steps and step in second.get(rank, ())
        }
        if different := {rank: names for rank, names in here.items() if names}:
            by = [
                first[rank][step].differs_by(second[rank][step], name)
                for rank, names in different.items()
                for name in names
            ]
            found = _difference(step, different, {rank: second[rank][step] for rank in different})
            return dataclasses.replace(found, by=None if None in by else max(each for each in by if each is not None))
    return None


def first_disagreement(states: States) -> Difference | None:
    """Returns the first step that replicas of a shard began from different states; None if there is none."""
    for step in _steps_of(states):
        there = {rank: steps[step] for rank, steps in states.items() if step in steps}
        base = next(iter(there.values()))
        here = {rank: base.differing(state) for rank, state in there.items()}
        if different := {rank: names for rank, names in here.items() if names}:
            return _difference(step, different, there)
    return None


def _steps_of(states: States) -> list[int]:
    return sorted({step for steps in states.values() for step in steps})


def _difference(step: int, different: dict[int, list[str]], states: dict[int, StepState]) -> Difference:
    names = dict.fromkeys(name for found in different.values() for name in found)
    return Difference(step, tuple(different), tuple(names), min(states[rank].at_s for rank in different))


def _ranks_differ(found: Difference, states: States) -> Explanation:
    base = next(rank for rank, steps in states.items() if found.step in steps)
    where = f"without any failure {_ranks(found.ranks, ())} and rank {base} are not the same: "
    where += f"{_when(found.step, states)}, in {_some_of(found.names)}"
    hint = "The protected state of all ranks has to be the same: what a rank keeps for itself alone is not protected."
    return Explanation(Kind.RANKS, (where, hint), found)


def _no_difference(second: RecordedRun) -> Explanation:
    if not second.digests:
        reached = ", ".join(f"rank {rank} at step {max(steps)}" for rank, steps in second.states.items())
        text = f"the second run has no digests: it ended before the last step was complete ({reached}): {second.reason}"
        return Explanation(Kind.UNFINISHED, (text,))
    text = "every tensor and every host value is the same: what differs is the order of entries in a state_dict()"
    return Explanation(Kind.UNKNOWN, (text,))


def _not_deterministic(step: int, num_faults: int) -> list[str]:
    """Returns the sentences for a difference before any fault."""
    text = (
        f"No fault had been injected by then. The script itself computes step {step - 1} differently: random numbers "
        "drawn outside of steps, the order of the data, the time of day, threads that add in another order?"
    )
    return [text, "--faults none runs it twice without any fault."] if num_faults else [text]


def _after_fault(where: str, found: Difference, fault: Mapping[str, Any]) -> Explanation:
    name, resume_step = fault["specification"], fault["resume_step"]
    whom = "" if fault["rank"] is None or "rank=" in name else f", which hit rank {fault['rank']}"
    after = f"the last fault before it: {name}{whom}"
    doubt = "To check whether the script is deterministic: --faults none runs it twice without any fault."
    if resume_step is None:
        return Explanation(Kind.UNKNOWN, (where, after, doubt), found, name)
    if found.step <= resume_step:
        hint = (
            f"The job resumed at step {resume_step}, from another state than the run without failures had there: does "
            "something change outside of 'with step:', or does a state_dict() leave something out?"
        )
        return Explanation(Kind.RESUMED, (where, after, hint, doubt), found, name)
    if found.by is not None and found.by < ROUNDING:
        hint = (
            f"The job resumed at step {resume_step} with its protected state intact, and step {found.step - 1} "
            "computed the same but for rounding: the same numbers were added in another order, as where gradients are "
            "reduced at another moment (no_sync(), a forward without a backward), in other buckets, or by another "
            "kernel. What starts over in a replacement changes more than that."
        )
        return Explanation(Kind.ROUNDED, (where, after, hint, doubt), found, name)
    hint = (
        f"The job resumed at step {resume_step} with its protected state intact, and step {found.step - 1} computed "
        "something else: it depends on something that protect() was not given (a counter, a best value, a random "
        "generator of the script's own, an iterator that was not recreated), which starts over in a replacement."
    )
    return Explanation(Kind.COMPUTED, (where, after, hint, doubt), found, name)


def _where(found: Difference, states: States) -> str:
    return f"{_when(found.step, states)}, on {_ranks(found.ranks, states)}"


def _when(step: int, states: States) -> str:
    if step == max(_steps_of(states)) and step:
        return f"after the last step ({step - 1})"
    own = next(steps[step].framework_step for steps in states.values() if step in steps)
    return f"at the start of step {step}" + (
        f", which comes after the framework's step {own}" if own is not None else ""
    )


def _ranks(ranks: Sequence[int], everyone: Collection[int]) -> str:
    if len(ranks) > 1 and len(ranks) == len(everyone):
        return "all ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _some_of(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
