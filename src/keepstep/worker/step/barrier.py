"""The gradient barrier: if one rank has begun the update, every rank has complete gradients."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.protocol.phases import StepEvent
from keepstep.worker.coordination import Coordination, StepInterrupted
from keepstep.worker.groups.registry import WORLD
from keepstep.worker.step.attempt import Attempt


def pass_gradient_barrier(coordination: Coordination, attempt: Attempt, decide: Callable[[], None]) -> None:
    """Waits until every rank has complete gradients; returns when this rank may, or must, run its update.

    When a failure comes while the rank is in the barrier it waits for the decision: if some rank has left the
    barrier the update is run, so that all are at the next step; else the step is undone.

    Args:
        coordination: of this rank.
        attempt: the present one.
        decide: waits for that decision; raises StepInterrupted where the step is to be undone.

    Raises:
        StepInterrupted: the step is to be undone.
    """
    attempt.before_barrier()
    if coordination.interrupted or coordination.machine.used_echo:
        raise StepInterrupted
    coordination.move(StepEvent.GRADIENTS_SYNCED)
    coordination.settled()
    if not _everybody_came(coordination):
        decide()
    coordination.move(StepEvent.BARRIER_LEFT)
    coordination.reduced_behind_update = False


def _everybody_came(coordination: Coordination) -> bool:
    assert coordination.groups is not None
    inner = coordination.groups.world.inner
    if inner is None:
        return False
    if coordination.groups.world.size() == 1:
        return not coordination.interrupted
    try:
        inner.barrier().wait()
    except RuntimeError as error:
        coordination.failed(WORLD, error)
        return False
    coordination.observe("barrier")
    return not coordination.interrupted
