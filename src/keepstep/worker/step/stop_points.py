"""Places inside forward and backward at which a rank can leave an interrupted step early.

Without them a survivor would compute the rest of a discarded step, for up to a step's time. They sit on a
few submodules and parameters, evenly spread, and cost one comparison each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from keepstep.protocol.phases import Phase
from keepstep.weights.memory.blocks import is_dtensor

NUM_STOP_POINTS = 64
"""Per direction at most: a survivor wastes little more than 1/64 of a pass."""
SPACING_S = 0.004
"""Not more than one in each such part of a step: each costs some 4 microseconds, all of them 0.2 % of it, and 4 ms do
not count in a recovery."""
LEARNING_STEPS = 10
"""After so many steps it is known how long one takes. The first ones are slower."""

Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


class StopPoints:
    """The stop points and the two phase marks on the protected modules, for the rest of the process."""

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        check: Callable[[], None],
        on_phase: Callable[[Phase], None],
    ) -> None:
        """Installs them.

        Args:
            modules: the modules as protected.
            check: raises `StepInterrupted` where the step is to be left.
            on_phase: called at the start of each forward of a protected module, and of each backward. Of a module that
                only holds others, such as the ``ModuleDict`` of a pipeline's stages, these are the protected ones.
        """
        self._check, self._on_phase = check, on_phase
        self._removable: list[list[RemovableHandle]] = []
        """The stop points of each module and direction; the phase marks are not among them."""
        self._steps_s: list[float] = []
        for root in modules.values():
            parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]
            if not parameters:
                continue
            for called in _called(root):
                called.register_forward_pre_hook(self._before_called)
                called.register_forward_hook(self._after_called)
            parts = spread([part for part in root.modules() if part is not root], NUM_STOP_POINTS)
            self._removable.append([part.register_forward_pre_hook(self._before_forward) for part in parts])
            if any(is_dtensor(parameter) for parameter in parameters):
                # FSDP accumulates into gathered parameters, which come and go: outputs are what backward passes.
                self._removable.append([part.register_forward_hook(self._after_forward) for part in parts])
                continue
            leaves = spread(parameters, NUM_STOP_POINTS)
            self._removable.append([leaf.register_post_accumulate_grad_hook(self._after_gradient) for leaf in leaves])

    def step_took(self, step_s: float) -> None:
        """Where steps are short, fewer stop points do: takes away those that are too many for steps of this length."""
        if len(self._steps_s) == LEARNING_STEPS:
            return
        self._steps_s.append(step_s)
        if len(self._steps_s) == LEARNING_STEPS:
            wanted = int(statistics.median(self._steps_s) / SPACING_S)
            for handles in self._removable:
                kept = {id(handle) for handle in spread(handles, wanted)}
                for handle in handles:
                    if id(handle) not in kept:
                        handle.remove()

    def _before_forward(self, _module: torch.nn.Module, _arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._check()

    def _before_called(self, _module: torch.nn.Module, _arguments: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._on_phase(Phase.FORWARD)
            self._check()

    def _after_called(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        _on_gradient_of(output, self._output_gradient)

    def _after_forward(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        _on_gradient_of(output, self._after_gradient)

    def _output_gradient(self, _gradient: torch.Tensor) -> None:
        self._on_phase(Phase.BACKWARD)

    def _after_gradient(self, _tensor: torch.Tensor) -> None:
        self._on_phase(Phase.BACKWARD)
        self._check()


def _called(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules of it that have a forward: itself, or where it only holds others, what it holds."""
    if type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [called for part in module.children() for called in _called(part)]


def _on_gradient_of(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Has a hook called when the backward has come to a module's output."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    first = next((leaf for leaf in _tensors(output) if leaf.requires_grad and leaf.grad_fn is not None), None)
    if first is not None:
        first.register_hook(hook)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
