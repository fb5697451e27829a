"""Places inside forward and backward where an interrupted step can be left early.

Without them a survivor would compute the rest of a step that is thrown away, up to a whole step's time. They sit on a
few submodules and parameters, evenly spread, and cost one comparison each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from keepstep.protocol.phases import Phase

NUM_STOP_POINTS = 64
"""Per direction: a survivor computes little more than 1/64 of a pass in vain, for some 100 microseconds a step."""

Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def install(
    modules: dict[str, torch.nn.Module],
    check: Callable[[], None],
    on_phase: Callable[[Phase], None],
) -> None:
    """Puts stop points and the two phase marks on the protected modules, for the rest of the process.

    Args:
        modules: the modules as protected.
        check: raises `StepInterrupted` where the step is to be left.
        on_phase: called at the start of each forward of a protected module, and of each backward.
    """

    def before_forward(_module: torch.nn.Module, _arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            check()

    def before_root(_module: torch.nn.Module, _arguments: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            on_phase(Phase.FORWARD)
            check()

    def after_gradient(_parameter: torch.Tensor) -> None:
        on_phase(Phase.BACKWARD)
        check()

    def output_gradient(gradient: torch.Tensor) -> torch.Tensor:
        on_phase(Phase.BACKWARD)
        return gradient

    def after_root(_module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        first = next((leaf for leaf in _tensors(output) if leaf.requires_grad and leaf.grad_fn is not None), None)
        if first is not None:
            first.register_hook(output_gradient)

    for root in modules.values():
        parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]
        if not parameters:
            continue
        root.register_forward_pre_hook(before_root)
        root.register_forward_hook(after_root)
        for module in spread([part for part in root.modules() if part is not root], NUM_STOP_POINTS):
            module.register_forward_pre_hook(before_forward)
        for parameter in spread(parameters, NUM_STOP_POINTS):
            parameter.register_post_accumulate_grad_hook(after_gradient)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
