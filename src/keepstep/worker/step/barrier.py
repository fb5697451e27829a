"""The gradient barrier: if one rank has begun the update, every rank has complete gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from keepstep.errors import StepInterrupted
from keepstep.protocol.phases import StepEvent
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import WORLD
from keepstep.worker.step.attempt import Attempt


def pass_gradient_barrier(
    coordination: Coordination,
    attempt: Attempt,
    decide: Callable[[], None],
    proposals: Sequence[int] = (),
) -> list[int] | None:
    """Waits until every rank has complete gradients; returns when this rank may, or must, run its update.

    When a failure comes while the rank is in the barrier it waits for the decision: if some rank has left the
    barrier the update is run, so that all are at the next step; else the step is undone.

    Args:
        coordination: of this rank.
        attempt: the present one.
        decide: waits for that decision; raises StepInterrupted where the step is to be undone.
        proposals: numbers of this rank's, in a barrier in which all ranks give as many.

    Returns:
        the greatest that any rank gave of each, where no failure came.

    Raises:
        StepInterrupted: the step is to be undone.
    """
    attempt.before_barrier()
    if coordination.interrupted or coordination.machine.used_echo:
        raise StepInterrupted
    coordination.move(StepEvent.GRADIENTS_SYNCED)
    coordination.settled()
    greatest = torch.tensor(proposals) if proposals else None
    is_passed = _all_arrived(coordination, greatest)
    if not is_passed:
        decide()
    coordination.move(StepEvent.BARRIER_LEFT)
    coordination.reduced_behind_update = False
    return greatest.tolist() if is_passed and greatest is not None else None


def _all_arrived(coordination: Coordination, greatest: torch.Tensor | None) -> bool:
    assert coordination.groups is not None
    inner = coordination.groups.world.inner
    if inner is None:
        return False
    if coordination.groups.world.size() == 1:
        return not coordination.interrupted
    try:
        inner.barrier(greatest).wait()
    except RuntimeError as error:
        coordination.failed(WORLD, error)
        return False
    coordination.observe("barrier")
    return not coordination.interrupted
