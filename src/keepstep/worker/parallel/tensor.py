"""Tensor parallelism: parameters that are DTensors, of which each rank holds its part.

A backward may leave a gradient ``Partial``: each rank then holds one summand, as for the norms under
`torch.distributed.tensor.parallel.SequenceParallel`. The optimizer would reduce it inside its update (torch 2.13). The
loss of a rank there would leave the others' parameters between two steps. So keepstep reduces it before the gradient
barrier. The values are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from keepstep.weights.memory.blocks import is_dtensor
from keepstep.worker.parallel.layout import Replicated


class TensorParallel(Replicated):
    """The adapter of `parallelize_module`, and of DTensors that a script has created itself."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        """Args:
        modules: the protected modules, by the user's names.
        """
        self._modules = list(modules.values())
        self._parameters: list[Any] = []

    @property
    def is_sharded(self) -> bool:
        """Always True."""
        return True

    def at_rest(self) -> None:
        """Collects the parameters again: the script may have changed its modules since `protect`."""
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        self._parameters = [parameter for parameter in parameters if is_dtensor(parameter)]

    def before_barrier(self) -> None:
        """Reduces the gradients that are ``Partial``."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and any(placement.is_partial() for placement in gradient.placements):
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def has_dtensors(modules: dict[str, torch.nn.Module]) -> bool:
    """Whether a parameter of these modules is a DTensor."""
    return any(is_dtensor(parameter) for module in modules.values() for parameter in module.parameters())
