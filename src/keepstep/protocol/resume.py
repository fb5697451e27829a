"""The resume rule: at which step training continues after a failure.

    Resume at the greatest step that every live copy can be brought to.
    If there is none: at the greatest that every shard can reach through at least one holder.

A holder's *reach* is the set of steps its copy of the shard can be brought to from where it stopped:

=====================================================  ==========
stopped in                                             reach
=====================================================  ==========
forward or backward of step i                          {i}
synced at step i (gradients complete, update not run)  {i, i+1}
optimizer of step i, or after it                       {i+1}
a checkpoint or snapshot of step s                     {s}
killed, or stopped in the middle of an update          {}
=====================================================  ==========
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from keepstep.protocol.phases import Phase


class Action(enum.StrEnum):
    """What one rank does to get to the resume step."""

    STAY = "stay"
    """Its parameters are at the resume step already; what the broken step left is dropped."""
    ADVANCE = "advance"
    """It runs the update it was synced for."""
    REWIND = "rewind"
    """It loads a snapshot or checkpoint of the resume step."""
    RESTORE = "restore"
    """It receives the shard from a live holder."""


def reach(step: int, phase: Phase) -> frozenset[int]:
    """The steps that a live rank's shard can be at, given where it stopped.

    Args:
        step: the step that the rank's tag names.
        phase: the phase that the rank's tag names.
    """
    match phase:
        case Phase.FORWARD | Phase.BACKWARD:
            return frozenset({step})
        case Phase.SYNCED:
            return frozenset({step, step + 1})
        case Phase.OPTIMIZER | Phase.UPDATED:
            return frozenset({step + 1})
        case Phase.STARTING:
            return frozenset()


def resume_step(shards: Mapping[str, Iterable[frozenset[int]]]) -> int | None:
    """The greatest step that every shard can reach through at least one holder, or None if there is none.

    Args:
        shards: for each shard of the job, the reach of each of its live holders (and checkpoints). A shard that
            lost all of its holders must be present with no holder: leaving it out would resume without it.
    """
    reachable = [frozenset().union(*holders) for holders in shards.values()]
    if not reachable:
        return None
    return max(frozenset.intersection(*reachable), default=None)


def common_step(reaches: Iterable[frozenset[int]], *, would_communicate: bool = False) -> int | None:
    """The greatest step that every live copy can be brought to by its own rank, or None if there is none.

    Args:
        reaches: for each live copy the steps it can be at, and those of the checkpoints that its rank can load; copies
            that reach nothing left away.
        would_communicate: a rank that would have to run its update, while the groups are broken, knows that the update
            holds a collective. Its value would be missing, and the copy might be of no use. So the least common step is
            taken: where no rank has left the gradient barrier, or only some whose copies are partially updated, the
            step is computed again.

    Where it exists it is taken, although `resume_step` may be greater by one: no rank then gives up a good copy for one
    that is still to come. Simulated jobs were lost otherwise: ranks that were synced ran the update, the only rank that
    was to send the new state of another shard died before it had, and no step was left that all shards could reach.

    It always exists between copies of which none was restored halfway. If a rank has left the gradient barrier of step
    i, every other one has at least complete gradients of it, and all can be at i+1; if none has, all can be at i.
    """
    live = list(reaches)
    if not live:
        return None
    choose = min if would_communicate else max
    return choose(frozenset.intersection(*live), default=None)


def action(step: int, own_reach: frozenset[int], current_step: int | None, snapshots: frozenset[int]) -> Action:
    """How one rank gets to ``step``.

    Args:
        step: the resume step.
        own_reach: the reach of the rank's live copy (empty for a replacement, or for a partially updated one).
        current_step: the step the live copy is at now, None if it is at none.
        snapshots: the steps of which this rank can load a snapshot or checkpoint.
    """
    if step in own_reach:
        return Action.STAY if step == current_step else Action.ADVANCE
    return Action.REWIND if step in snapshots else Action.RESTORE
