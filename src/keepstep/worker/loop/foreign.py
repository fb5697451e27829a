"""Steps for a training loop that belongs to a framework. After an interruption, the framework enters its loop again.

Such a loop is a sequence of *units*: an optimizer step with its forward and backward, or the framework's work after
one, such as an evaluation with a checkpoint. A unit is committed when all ranks have finished it. If it is interrupted,
`StepInterrupted` leaves the framework's loop, keepstep restores the protected state of the unit's beginning, and every
rank, including a replacement, enters the loop there by the framework's own way of resuming.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from keepstep.errors import StepInterrupted
from keepstep.weights.memory.blocks import local_of
from keepstep.worker.step_controller import StepController


class ForeignLoop:
    """One rank's units. All methods are called by the training thread."""

    def __init__(self, begin: Callable[[], StepController], number: Callable[[], int], name: str) -> None:
        """Args:
        begin: `Session.begin`.
        number: returns the framework's own number of the last step in the protected state.
        name: what the framework calls this number.
        """
        self._begin = begin
        self._number = number
        self._name = name
        self._has_resumed = False
        """Whether a unit was handed out for the first time after a recovery, and the user has not been told."""
        self._controller: StepController | None = None
        self.index = 0
        """Number of the current unit."""
        self.is_inside = False
        """Whether the current unit has begun."""

    @property
    def controller(self) -> StepController:
        """The controller of this rank's steps. Available from `enter` on."""
        assert self._controller is not None, "the loop was not entered"
        return self._controller

    def enter(self) -> None:
        """Starts the loop. Call it before the framework enters its own loop. A spare waits here for a rank.

        On return the protected state contains the position at which the framework must enter its loop.
        """
        self._controller = self._begin()
        self._controller.leave_between_steps()  # an evaluation, for example
        self.go_back()

    def begin(self, draws_as: int) -> None:
        """Begins the current unit. Call it before the forward and backward.

        Args:
            draws_as: number of the step whose random numbers the unit draws.
        """
        self.is_inside = True
        self.controller.begin(draws_as)

    def commit(self) -> None:
        """Commits the unit and makes the next one the current unit.

        Raises:
            StepInterrupted: a recovery has changed the protected state, so it is not the state after this unit.
        """
        controller = self.controller
        if not self.is_inside:
            self.begin(self.index)
        controller.commit()
        self.is_inside = False
        former = self.index
        self._hand_out(sys.maxsize)
        if self.index != former + 1 or controller.resumed:
            raise StepInterrupted

    def go_back(self) -> None:
        """Waits for the recovery. Call it after `is_interruption` returned True; `enter` calls it, too.

        On return the protected state contains the position at which the framework must enter its loop. Rank 0 prints
        it: the user knows the framework's numbers, and messages have keepstep's.
        """
        self._hand_out(sys.maxsize)
        if self._has_resumed and self.controller.is_main:
            print(f"keepstep: step {self.index} comes after {self._name} {self._number()}", file=sys.stderr, flush=True)
        self._has_resumed = False

    def is_interruption(self, error: BaseException) -> bool:
        """Whether a failure of another rank caused an exception. If so, this method undoes the unit.

        Args:
            error: the exception that left the framework's loop.
        """
        controller = self.controller
        if not controller.is_interruption(error):
            return False
        controller.undo()
        self.is_inside = False
        return True

    def run(self, loop: Callable[[], object], put: Callable[[], object]) -> None:
        """Runs the framework's loop until all ranks have reached its end, and enters it again after an interruption.

        Args:
            loop: runs the rest of the framework's loop, from the position in the protected state.
            put: sets the framework's own state from the protected state.
        """
        while True:
            try:
                loop()
                if self.finish():
                    return
                put()
            except BaseException as error:  # an interruption may be of any kind
                if not self.is_interruption(error):
                    raise
                self.go_back()
                put()

    def finish(self) -> bool:
        """Ends the loop on this rank. Call it when the framework's loop and the protected state are at the end.

        Returns:
            True if all ranks have reached the end. If False, the framework must enter its loop again.
        """
        self.controller.undo()  # the current unit is not needed
        index = self.controller.next_step(self.index)
        if index is not None:
            self.index = index
        return index is None

    def _hand_out(self, num_steps: int) -> None:
        index = self.controller.next_step(num_steps)
        if index is None:  # the job is drained, and the script handles the signal itself
            raise SystemExit(0)
        self.index = index
        self._has_resumed |= self.controller.resumed
        self.controller.take_framework_step(self._number())


def numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """Keyword arguments for `Session.protect`: one object as ``name``, several as ``name`` with a number each."""
    if len(things) == 1:
        return {name: things[0]}
    return {f"{name}{number}": thing for number, thing in enumerate(things)}


def warn_of_release(framework: str, present: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Warns if keepstep was not tested with the installed release of a framework.

    Args:
        framework: name of the framework.
        present: the installed version.
        tested: the range of tested releases: the first tested one, and the first one after the range.
    """
    version = tuple(int(part) for part in present.split("+")[0].split(".")[:2])
    if not tested[0] <= version < tested[1]:
        between = " to ".join(".".join(map(str, each)) for each in tested)
        warnings.warn(
            f"keepstep was tested with {framework} {between} (exclusive); this is {present}",
            RuntimeWarning,
            stacklevel=4,
        )


def warn_of_tensors(callbacks: Iterable[object], modules: Iterable[torch.nn.Module], what_to_do: str) -> None:
    """Warns of callbacks that keep tensors or modules of their own, such as averaged weights: they are not restored.

    Args:
        callbacks: callbacks whose state is not protected.
        modules: protected modules. Callbacks may keep references to their tensors.
        what_to_do: advice at the end of the warning.
    """
    own = {_storage(tensor) for module in modules for tensor in _tensors(module)}
    for callback in callbacks:
        names = [name for name, value in vars(callback).items() if not own.issuperset(map(_storage, _tensors(value)))]
        if names:
            warnings.warn(
                f"keepstep: {type(callback).__name__} keeps tensors ({', '.join(names)}), which are not protected: on "
                f"a replacement they begin anew. If training changes them, {what_to_do}",
                RuntimeWarning,
                stacklevel=2,
            )


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.layout is torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()
