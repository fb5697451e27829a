"""Describes in one sentence why a job makes no progress: where ranks wait, and which operations do not match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import ALL_MEMBERS, ANY_MEMBER, Operation, OperationCount, Standing, WaitsFor
from keepstep.protocol.wording import place_of, who

Key = TypeVar("Key")

WORLD = "world"
MAX_PARTS = 6
"""Most places that a sentence names. With more, it would not be readable."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankState:
    """The controller's knowledge of one rank."""

    rank: int
    standing: Standing | None = None
    """The position of a rank without progress; None: it has made progress recently."""
    since_s: float = 0.0
    """Time of the rank's last progress, if ``standing`` is set."""
    finished_at: int | None = None
    """The number of steps after which the rank's loop ended; None if it has not."""
    heard_s: float | None = None
    """When the controller last heard the rank's node, if that is silent; else None."""

    @property
    def waits(self) -> bool:
        """Whether the rank waits in a collective, a send or a recv, or for a reader."""
        return self.standing is not None and self.standing.waits_for in (WaitsFor.RANKS, WaitsFor.READER)

    def has_begun(self, step: int) -> bool:
        """Returns whether the rank makes no progress inside this step or a later one."""
        standing = self.standing
        return standing is not None and standing.step >= step and standing.phase not in (Phase.STARTING, Phase.UPDATED)


def explain(ranks: Sequence[RankState], now_s: float | None) -> str | None:
    """Returns the sentence; None if no rank waits for another one, or for somebody to read its output.

    Args:
        ranks: all ranks of the job.
        now_s: the present time; None leaves out durations and what processes do, so that equal situations have equal
            sentences.
    """
    if not any(state.waits for state in ranks):
        return None
    alike: dict[str, list[RankState]] = {}
    for state in ranks:
        alike.setdefault(_where(state), []).append(state)
    parts = [_part(where, states, now_s) for where, states in alike.items()]
    more = [f"{len(parts) - MAX_PARTS} other places are left out"] if len(parts) > MAX_PARTS else []
    return "; ".join(parts[:MAX_PARTS] + more + _mismatches(ranks))


def uneven(ranks: Sequence[RankState]) -> str | None:
    """Returns why the job can never complete another step; None if that is not certain.

    That is certain if a rank has ended its loop, and another rank is in a step after that end. The step needs the
    gradients of all ranks, but the first rank takes part in no further step. In another generation it would end its
    loop at the same place.
    """
    ended = [state for state in ranks if state.finished_at is not None]
    if not ended:
        return None
    last = min(state.finished_at for state in ended if state.finished_at is not None)
    short = [state.rank for state in ended if state.finished_at == last]
    beyond = [state for state in ranks if state.has_begun(last)]
    if not beyond:
        return None
    step = min(state.standing.step for state in beyond if state.standing is not None)
    others = [state.rank for state in beyond]
    return (
        f"{who(short)} ended {_its(short)} loop after {last} steps, and {who(others)} {_is(others)} in "
        f"step {step}, which all ranks have to take part in: give session.steps() the same number on every rank, and "
        "leave the loop at the same step"
    )


# ---- where a rank waits ---------------------------------------------------------------------------------------------


def _where(state: RankState) -> str:
    """Returns what a rank does, in words that are the same for all ranks in the same situation."""
    standing = state.standing
    if state.finished_at is not None:
        return f"HAS ended ITS loop after {state.finished_at} steps"
    if standing is None:
        return "HAS moved lately" if state.heard_s is None else "HAS moved by the last report of ITS nodeAGO"
    place = place_of(standing.phase, standing.step).removeprefix("in ")
    if standing.waits_for is WaitsFor.CONTROLLER:
        return f"HAS waited for the controllerTIME ({place})"
    if standing.waits_for is WaitsFor.SIGNAL:
        return f"HAS been stopped by a signal (SIGSTOP)TIME ({place})"
    if standing.waits_for is WaitsFor.READER:
        return f"HAS waited for somebody to read ITS outputTIME ({place})"
    if standing.waits_for is WaitsFor.NOTHING:
        return f"HAS computedTIME ({place}, in no collective)"
    if standing.phase is Phase.SYNCED:
        return f"HAS been in the gradient barrier of step {standing.step}TIME"
    waiting = [count for count in standing.counts if count.in_flight]
    return f"HAS been in {' and '.join(map(_operation, waiting[:3])) or 'a collective'}TIME ({place})"


def _operation(count: OperationCount) -> str:
    name = WORLD if count.group == WORLD else f"group {count.group}"
    if count.peer == ALL_MEMBERS:
        first, last = count.left + 1, count.entered
        return f"{count.operation} {f'#{last}' if first >= last else f'#{first} to #{last}'} of {name}"
    preposition = "to" if count.operation is Operation.SEND else "from"
    peer = "any rank" if count.peer == ANY_MEMBER else f"rank {_global_rank(count.group, count.peer)}"
    return f"{count.operation} #{count.entered} {preposition} {peer} in {name}"


def _global_rank(group: str, peer: int) -> int | str:
    """Returns the global rank of a group's member. The group's name lists its members, unless it was too long."""
    members = group.rpartition(".")[0].split("-")
    if group == WORLD:
        return peer
    return members[peer] if "~" not in group and peer < len(members) else f"{peer} of its members"


def _part(where: str, states: list[RankState], now_s: float | None) -> str:
    ranks = [state.rank for state in states]
    time = ""
    if now_s is not None:
        still_s = max(0.0, now_s - max(state.since_s for state in states))
        time = f" for {still_s:.0f} s" if still_s >= 10 else f" for {still_s:.1f} s"
    heard_s = max((state.heard_s for state in states if state.heard_s is not None), default=None)
    ago = "" if now_s is None or heard_s is None else f", {now_s - heard_s:.1f} s ago"
    words = where.replace("HAS", _has(ranks), 1).replace("ITS", _its(ranks), 1).replace("TIME", time, 1)
    words = words.replace("AGO", ago, 1)
    return f"{who(ranks)} {words}{'' if now_s is None else _doing(states)}"


def _doing(states: list[RankState]) -> str:
    """Returns what the process of the first rank does that tells it; where ranks wait for others, the others' code is
    at the same place in most cases."""
    told = ((state.rank, state.standing.doing) for state in states if state.standing is not None)
    rank, doing = next((each for each in told if each[1]), (0, ""))
    return f", {doing}" if doing and len(states) == 1 else f", rank {rank} {doing}" if doing else ""


# ---- mismatches -----------------------------------------------------------------------------------------------------


def _mismatches(ranks: Sequence[RankState]) -> list[str]:
    """Returns, for groups in which a rank waits, members that entered fewer collectives, or another kind."""
    groups: dict[str, dict[int, OperationCount]] = {}
    for state in ranks:
        for count in state.standing.counts if state.standing is not None else ():
            if count.peer == ALL_MEMBERS:
                groups.setdefault(count.group, {})[state.rank] = count
    found = []
    for group, counts in groups.items():
        if any(count.in_flight for count in counts.values()):
            found += _mismatch(WORLD if group == WORLD else f"group {group}", counts)
    return found[:MAX_PARTS]


def _mismatch(group: str, counts: dict[int, OperationCount]) -> list[str]:
    by_number = _by(counts, lambda count: count.entered)
    if len(by_number) > 1:
        most, *others = sorted(by_number.items(), reverse=True)
        first = f"{who(most[1])} {_has(most[1])} entered {most[0]} collectives of {group}"
        rest = [f"{who(members)} {_has(members)} entered {num}" for num, members in others[:MAX_PARTS]]
        return [", ".join([first, *rest, *(["others fewer"] if len(others) > MAX_PARTS else [])])]
    by_kind = _by(counts, lambda count: count.operation)
    if len(by_kind) > 1:
        number = next(iter(by_number))
        kinds = ", ".join(f"{who(members)} in {kind}" for kind, members in by_kind.items())
        return [f"collective #{number} of {group} is not the same everywhere: {kinds}"]
    return []


def _by(counts: dict[int, OperationCount], key: Callable[[OperationCount], Key]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for rank, count in counts.items():
        found.setdefault(key(count), []).append(rank)
    return found


# ---- words ----------------------------------------------------------------------------------------------------------


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _is(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _its(ranks: list[int]) -> str:
    return "its" if len(ranks) == 1 else "their"
