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
from keepstep.worker.hooks import hook_after, hook_before, hook_gradient, on_gradient_of

NUM_STOP_POINTS = 64
"""Maximum number per direction. A survivor then wastes little more than 1/64 of a pass."""
SPACING_S = 0.004
"""Minimum step time per stop point and direction, in seconds. A stop point costs some 4 microseconds, all of them 0.2 %
of a step. A delay of 4 ms does not matter in a recovery."""
LEARNING_STEPS = 10
"""Number of steps whose median gives the length of a step. The first steps are slower."""

Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


class StopPoints:
    """The stop points and the two phase marks on the protected modules."""

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        check: Callable[[], None],
        on_phase: Callable[[Phase], None],
    ) -> None:
        """Installs the hooks.

        Args:
            modules: the protected modules, by name.
            check: raises `StepInterrupted` if the script must leave the step.
            on_phase: called at the start of each forward of a protected module, and of each backward. If a module only
                holds others, such as the ``ModuleDict`` of a pipeline's stages, the modules in it count instead.
        """
        self._check, self._on_phase = check, on_phase
        self._removable: list[list[RemovableHandle]] = []
        """Handles of the stop points, per module and direction."""
        self._steps_s: list[float] = []
        for root in modules.values():
            parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]
            if not parameters:
                continue
            for called in filter(_takes_hooks, _called(root)):
                hook_before(called, self._before_called)
                hook_after(called, self._after_called)
            inner = [part for part in root.modules() if part is not root]
            parts = spread(list(filter(_takes_hooks, inner)), NUM_STOP_POINTS)
            self._removable.append([hook_before(part, self._before_forward) for part in parts])
            if any(is_dtensor(parameter) for parameter in parameters):
                # FSDP accumulates into gathered parameters, which are temporary. So the hooks are on outputs.
                self._removable.append([hook_after(part, self._after_forward) for part in parts])
                continue
            leaves = spread(parameters, NUM_STOP_POINTS)
            self._removable.append([hook_gradient(leaf, self._after_gradient) for leaf in leaves])

    def step_took(self, step_s: float) -> None:
        """Records the length of a step, in seconds. After `LEARNING_STEPS` steps, removes superfluous stop points."""
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
        on_gradient_of(output, self._output_gradient)

    def _after_forward(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        on_gradient_of(output, self._after_gradient)

    def _output_gradient(self, _gradient: torch.Tensor) -> None:
        self._on_phase(Phase.BACKWARD)

    def _after_gradient(self, _tensor: torch.Tensor) -> None:
        self._on_phase(Phase.BACKWARD)
        self._check()


def _takes_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks can be added to a module: not to what was scripted."""
    return not isinstance(module, torch.jit.ScriptModule)


def _called(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules with a forward: the module itself or, if it only holds others, those in it."""
    if type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [called for part in module.children() for called in _called(part)]
