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
    """Waits until every rank has complete gradients. Returns when this rank may, or must, run its update.

    If a failure comes while the rank is in the barrier, the rank waits for the controller's decision. If some rank has
    left the barrier, this rank must run its update, so that all ranks are at the next step. Otherwise it undoes the
    step.

    Args:
        coordination: coordination of this rank.
        attempt: the current attempt.
        decide: waits for that decision; raises StepInterrupted if the step must be undone.
        proposals: numbers of this rank. All ranks must give the same number of them.

    Returns:
        the maximum of each number over all ranks; None without proposals, or if a failure came.

    Raises:
        StepInterrupted: the step must be undone.
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
