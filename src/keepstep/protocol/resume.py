"""The resume rule: at which step training continues after a failure.

    Resume at the greatest step that every live copy can be brought to.
    If there is none, resume at the greatest step that every shard can reach through at least one holder.

A holder's *reach* is the set of steps to which it can bring its copy of the shard from where it stopped:

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
    """The way in which one rank gets to the resume step."""

    STAY = "stay"
    """Its parameters are at the resume step already. It drops what the interrupted step has left."""
    ADVANCE = "advance"
    """It runs the update it was synced for."""
    REWIND = "rewind"
    """It loads a snapshot or checkpoint of the resume step."""
    RESTORE = "restore"
    """It receives the shard from a live holder."""


def reach(step: int, phase: Phase) -> frozenset[int]:
    """Returns the reach of a live rank, given where it stopped.

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
    """Returns the greatest step that every shard can reach through at least one holder, or None if there is none.

    Args:
        shards: for each shard of the job, the reach of each of its live holders (and checkpoints). A shard that has
            lost all of its holders must be present with no holder: without the entry, the job would resume without it.
    """
    reachable = [frozenset().union(*holders) for holders in shards.values()]
    if not reachable:
        return None
    return max(frozenset.intersection(*reachable), default=None)


def common_step(reaches: Iterable[frozenset[int]], *, would_repeat: bool = False) -> int | None:
    """Returns the greatest step to which every rank with a live copy can bring it itself, or None if there is none.

    Args:
        reaches: for each live copy its reach, and the steps of the checkpoints that its rank can load. The caller
            leaves out copies that reach no step.
        would_repeat: the update of a synced rank contains a collective. The groups are broken, so the collective
            would return no valid value, and the copy could become useless. Or it is the end of an epoch, and the lost
            rank may not have made its deferred calls. Then the function returns the least common step: if no rank has
            left the gradient barrier, or only ranks with partially updated copies have, the ranks compute the step
            again.

    The caller prefers this step, although `resume_step` may be greater by one: so no rank gives up a good copy for a
    transfer that has yet to succeed. Without this preference, simulated jobs were lost: synced ranks ran their update,
    the only rank that held the new state of another shard died before it had sent it, and no step was left that all
    shards could reach.

    The step always exists if no copy is halfway restored. If a rank has left the gradient barrier of step i, every
    other rank has complete gradients of step i, and all can be at i+1. If no rank has left it, all can be at i.
    """
    live = list(reaches)
    if not live:
        return None
    choose = min if would_repeat else max
    return choose(frozenset.intersection(*live), default=None)


def action(step: int, own_reach: frozenset[int], current_step: int | None, snapshots: frozenset[int]) -> Action:
    """Returns how one rank gets to ``step``.

    Args:
        step: the resume step.
        own_reach: the reach of the rank's live copy (empty for a replacement, or for a partially updated one).
        current_step: the step that the live copy is at now; None if it is at none.
        snapshots: the steps of which this rank can load a snapshot or checkpoint.
    """
    if step in own_reach:
        return Action.STAY if step == current_step else Action.ADVANCE
    return Action.REWIND if step in snapshots else Action.RESTORE
