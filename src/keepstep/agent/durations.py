"""Durations of the phases of a step, from a worker's ring buffer. Unlike polling, it misses no short phase."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from keepstep.protocol.messages import Tag
from keepstep.protocol.node.liveness import was_passed
from keepstep.protocol.phases import Phase
from keepstep.shared.tagpage import PhaseEvent


def longest_phases(events: Iterable[PhaseEvent], since_ns: int = 0) -> list[tuple[Phase, float, float]]:
    """Returns the longest completed instance of each phase.

    Args:
        events: phase changes, oldest first, including the last one of the previous call.
        since_ns: time of that last one. Phases that had ended by then do not count again.

    Returns:
        (phase, begin, end), in seconds of the node's monotonic clock.
    """
    found: dict[Phase, tuple[int, int]] = {}
    for before, after in pairwise(events):
        began_ns, ended_ns = found.get(before.phase, (0, -1))
        is_longer = after.at_ns > since_ns and after.at_ns - before.at_ns > ended_ns - began_ns
        if is_longer and was_passed(_tag(before), _tag(after)):
            found[before.phase] = before.at_ns, after.at_ns
    return [(phase, began_ns / 1e9, ended_ns / 1e9) for phase, (began_ns, ended_ns) in found.items()]


def _tag(event: PhaseEvent) -> Tag:
    return Tag(event.generation, event.step, event.phase)
