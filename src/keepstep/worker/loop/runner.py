"""A function as the body of a step: it is called again until its step is committed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from keepstep.errors import InternalError, NothingToRecoverFrom, UsageError
from keepstep.worker.loop.step import Step
from keepstep.worker.step_controller import StepController

Result = TypeVar("Result")


class StepRunner:
    """Runs functions as steps. It keeps their arguments as long as the job may go back to their steps."""

    def __init__(self, controller: StepController) -> None:
        self._controller = controller
        self._kept: dict[int, _Call] = {}
        """The kept calls, by step index."""

    def run(self, step: Step, function: Callable[..., Result], arguments: Any, keywords: Any) -> Result:
        """Calls the function in a step, and repeats the call until the step is committed.

        If the job goes back to an earlier step, this method first calls the functions of that and the following steps
        again.

        Args:
            step: a step that was yielded and not entered.
            function: the body of the step.
            arguments: positional arguments of the function.
            keywords: keyword arguments of the function.

        Returns:
            the result of the committed call.

        Raises:
            UsageError: the function has changed a tensor argument in place.
            NothingToRecoverFrom: the job has gone back to a step whose arguments are not kept.
        """
        self._forget(step.index)
        self._kept[step.index] = _Call(function, arguments, keywords)
        attempt = step
        while True:
            call = self._kept.get(attempt.index)
            if call is None:
                raise NothingToRecoverFrom(
                    f"the job goes back to step {attempt.index}, and the arguments of run_step() are kept from step "
                    f"{min(self._kept)} on only"
                )
            with attempt:
                result = call()
            if attempt.committed and attempt.index == step.index:
                step.attempt, step.committed = attempt.attempt, True
                return result  # type: ignore[no-any-return]  # of this very function
            attempt = self._next(attempt, step.index)

    def _next(self, attempt: Step, last: int) -> Step:
        index = self._controller.go_on()
        if index is None or index > last:
            raise InternalError(f"step {attempt.index} was not run to its end, and step {index} is handed out")
        return Step(self._controller, index, self._controller.attempt, self._controller.resumed)

    def _forget(self, present: int) -> None:
        first = self._controller.earliest_step(present)
        self._kept = {index: call for index, call in self._kept.items() if first <= index < present}


class _Call:
    """A function with its arguments, which can be called several times."""

    def __init__(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> None:
        self._function = function
        self._arguments, self._keywords = arguments, keywords
        self._tensors = [
            (leaf, leaf._version)
            for leaf in tree_leaves((arguments, keywords))
            if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]

    def __call__(self) -> Any:
        arguments, keywords = tree_map(_copied, (self._arguments, self._keywords))
        result = self._function(*arguments, **keywords)
        if any(tensor._version != version for tensor, version in self._tensors):
            raise UsageError(
                f"run_step(): {getattr(self._function, '__name__', self._function)!s} has changed a tensor in place "
                "that it was given; where the step is repeated it would get the changed one: have it change a copy"
            )
        return result


def _copied(leaf: Any) -> Any:
    """A shallow copy of a container; pytree containers are copied by ``tree_map`` itself."""
    return copy.copy(leaf) if hasattr(leaf, "__setitem__") and not isinstance(leaf, torch.Tensor) else leaf
