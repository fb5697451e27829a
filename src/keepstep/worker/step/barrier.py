"""The gradient barrier: if one rank has begun the update, every rank has complete gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from keepstep.errors import StepInterrupted, UsageError
from keepstep.protocol.messages import Membership
from keepstep.protocol.phases import StepEvent
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import WORLD


class Purpose(enum.IntEnum):
    """What a rank comes to the barrier for."""

    NONE = 0
    """It has no optimizer with parameters, so it says nothing."""
    UPDATE = 1
    """To run its update."""
    END = 2
    """To end the step without an update."""


class Votes(NamedTuple):
    """What a rank says in the barrier, and what all ranks hear: the greatest number that any of them said."""

    purpose: Purpose
    every: int
    """Steps between two snapshots; 0: not in this step."""
    is_busy: bool
    """Whether the rank is still writing its part of a checkpoint."""


def pass_gradient_barrier(
    coordination: Coordination,
    votes: Votes,
    decide: Callable[[], None],
) -> Votes | None:
    """Waits until every rank has complete gradients. Returns when this rank may, or must, run its update.

    If a failure comes while the rank is in the barrier, the rank waits for the controller's decision. If some rank has
    left the barrier, this rank must run its update, so that all ranks are at the next step. Otherwise it undoes the
    step.

    Args:
        coordination: coordination of this rank.
        votes: what this rank says.
        decide: waits for that decision; raises StepInterrupted if the step must be undone.

    Returns:
        the greatest of all ranks' votes; None if a failure came.

    Raises:
        StepInterrupted: the step must be undone.
        UsageError: some ranks that hold the same shard have come for an update, and others to end the step.
    """
    if coordination.interrupted or coordination.machine.used_echo:
        raise StepInterrupted
    coordination.move(StepEvent.GRADIENTS_SYNCED)
    coordination.settled()
    greatest = np.array(
        (votes.purpose is Purpose.UPDATE, votes.purpose is Purpose.END, votes.every, votes.is_busy), np.int64
    )
    is_passed = _all_arrived(coordination, greatest)
    updates, ends, every, is_busy = greatest.tolist()
    if is_passed and updates and ends:
        is_passed = _is_one_purpose(coordination, votes.purpose)
    if is_passed:
        coordination.observe("barrier")
        is_passed = not coordination.interrupted
    if not is_passed:
        decide()
    coordination.move(StepEvent.BARRIER_LEFT)
    coordination.reduced_behind_update = False
    return Votes(votes.purpose, every, bool(is_busy)) if is_passed else None


def await_all(coordination: Coordination) -> None:
    """Waits until every rank comes here, in the same step.

    Raises:
        StepInterrupted: a failure came: the step must be undone.
    """
    is_whole = not coordination.interrupted and not coordination.machine.used_echo
    if not (is_whole and _all_arrived(coordination, np.zeros(1, np.int64))):
        raise StepInterrupted


def _is_one_purpose(coordination: Coordination, purpose: Purpose) -> bool:
    """Has all ranks tell for what they have come, and checks that replicas agree. Returns whether no failure came."""
    machine = coordination.machine
    assert machine.rank is not None
    assert machine.membership is not None
    purposes = np.zeros(machine.membership.world_size, np.int64)
    purposes[machine.rank] = purpose
    if not _all_arrived(coordination, purposes):
        return False
    check_purposes(machine.steps.step, list(map(Purpose, purposes.tolist())), machine.membership)
    return True


def check_purposes(step: int, purposes: Sequence[Purpose], membership: Membership) -> None:
    """Checks that ranks that hold the same shard all run an update, or none does.

    Stages of a pipeline may differ, and so may gradient scalers that skip an update on a part of the model.

    Args:
        step: the step, for the message.
        purposes: of each rank.
        membership: says which ranks are replicas of each other.

    Raises:
        UsageError: names the ranks that do not.
    """
    for ranks in membership.replicas.values():
        updating = [rank for rank in ranks if purposes[rank] is Purpose.UPDATE]
        ending = [rank for rank in ranks if purposes[rank] is Purpose.END]
        if updating and ending:
            raise UsageError(
                f"step {step}: ranks {updating} call optimizer.step(), and ranks {ending} end the step without it. "
                "They hold the same parameters, which would differ from then on: decide on an update by what is the "
                "same on all of them"
            )


def _all_arrived(coordination: Coordination, greatest: np.ndarray) -> bool:
    assert coordination.groups is not None
    inner = coordination.groups.world.inner
    if inner is None:
        return False
    if coordination.groups.world.size() == 1:
        return not coordination.interrupted
    try:
        inner.barrier(torch.from_numpy(greatest)).wait()
    except RuntimeError as error:
        coordination.failed(WORLD, error)
        return False
    return not coordination.interrupted
