"""ZeRO-1 (`torch.distributed.optim.ZeroRedundancyOptimizer`): all ranks hold the parameters, each its optimizer state.

Its ``step()`` has an inner, plain optimizer update the parameters that this rank owns, and then broadcasts each rank's
parameters to the others. So a rank is the only holder of the optimizer state of its own parameters.

If a broadcast was cut off, the copy counts as partially updated and goes back to its snapshot. keepstep could repeat
the broadcasts after the reset instead, because every owner's part is whole. That would help only if no rank was lost:
the optimizer state of a lost rank is in its snapshot alone, so all ranks have to go back then. And the script's code
after ``step()`` would see parameters of two steps.
"""

from __future__ import annotations

from typing import Any

import torch

from keepstep.errors import ConfigurationError
from keepstep.typenames import is_named
from keepstep.weights.memory.blocks import is_dtensor
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.parallel.layout import Replicated


def is_zero(thing: object) -> bool:
    """Whether an object is a `ZeroRedundancyOptimizer`, by its class's name: the import takes long and warns."""
    return is_named(thing, "ZeroRedundancyOptimizer")


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's state: the one inside a `ZeroRedundancyOptimizer`, else itself."""
    if not is_zero(optimizer):
        return optimizer
    zero: Any = optimizer
    inner: torch.optim.Optimizer = zero.optim
    return inner


def writes_buffers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this rank writes the module buffers to a checkpoint: only the first rank of a ZeRO group does.

    Each rank has its own running statistics, and DDP begins the next forward with those of its first rank.
    """
    if not is_zero(optimizer):
        return True
    zero: Any = optimizer
    group: SurvivingGroup = zero.process_group
    return group.rank() == 0


class ZeroRedundancy(Replicated):
    """The adapter of ZeRO-1."""

    def __init__(self, found: dict[str, Any]) -> None:
        """Args:
            found: the optimizers, by the user's names.

        Raises:
            ConfigurationError: one of them cannot be protected.
        """
        for name, optimizer in found.items():
            _check(name, optimizer)

    @property
    def is_sharded(self) -> bool:
        """Always True: each rank holds its own optimizer state."""
        return True


def _check(name: str, optimizer: Any) -> None:
    who = f"protect({name}=ZeroRedundancyOptimizer)"
    if optimizer._overlap_with_ddp:
        raise ConfigurationError(
            f"{who}: overlap_with_ddp=True updates parameters inside of backward(), before all gradients are complete, "
            "so a step could not be undone; leave overlap_with_ddp off"
        )
    if not isinstance(optimizer.process_group, SurvivingGroup):
        raise ConfigurationError(
            f"{who}: its process group was not made by keepstep; call keepstep.init() before it, in place of "
            "torch.distributed.init_process_group()"
        )
    if any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(
            f"{who}: its parameters are sharded already, and their optimizer state with them; use the optimizer that "
            "it wraps, without ZeroRedundancyOptimizer"
        )
