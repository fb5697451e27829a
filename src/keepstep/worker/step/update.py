"""Refuses updates in which the loss of a rank would leave the others between two steps."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.worker.coordination import Coordination


def check_call(arguments: Any, keywords: Any) -> None:
    """Checks a call of ``optimizer.step()`` before it runs.

    Args:
        arguments: positional arguments of the call, the optimizer first.
        keywords: keyword arguments of the call.

    Raises:
        UsageError: the call computes gradients in mid-update, or runs before all gradients are complete.
    """
    if keywords.get("closure") is not None or any(callable(argument) for argument in arguments[1:]):
        raise UsageError(
            "optimizer.step(closure): the closure computes gradients in mid-update; call backward() before step()"
        )
    if torch._C._current_graph_task_id() != -1:
        raise UsageError("optimizer.step() ran inside backward(): other gradients are not complete then; call it after")


def check_gradients(optimizer: torch.optim.Optimizer, coordination: Coordination) -> None:
    """Checks that the gradients of an update were complete when this rank left the gradient barrier.

    Raises:
        UsageError: a backward after the first update of the step has reduced gradients.
    """
    if coordination.reduced_behind_update:
        raise UsageError(
            f"step {coordination.machine.steps.step}: {type(optimizer).__name__}.step() takes gradients that a "
            "backward after another optimizer.step() has reduced: a rank that is lost in between would leave every "
            "other rank's parameters between two steps. Run all backwards before the first optimizer.step(), or give "
            "each update a step of its own: for a GAN the discriminator in even steps, the generator in odd ones"
        )


def check_alone(optimizer: torch.optim.Optimizer, coordination: Coordination) -> None:
    """Checks after an update that it ran no collectives. Called if there are no snapshots to go back to.

    Raises:
        UsageError: the update ran collectives.
    """
    if not coordination.updates_alone:
        raise UsageError(
            f"{type(optimizer).__name__}.step() runs collectives: a rank that is lost in one leaves every other rank's "
            "parameters between two steps, and no snapshot is taken that they could go back to. Let them be taken, "
            "protect(snapshot_every=1), or use an optimizer whose update needs no other rank, such as torch.optim.AdamW"
        )
