"""The steps of a loop that belongs to a framework, and is entered again where it was interrupted.

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

    def __init__(self, begin: Callable[[], StepController]) -> None:
        """Args:
        begin: `Session.begin`.
        """
        self._begin = begin
        self._controller: StepController | None = None
        self.index = 0
        """Of the unit that was handed out last."""
        self.is_inside = False
        """Whether it was begun."""

    @property
    def controller(self) -> StepController:
        """What takes this rank through its steps, from `enter` on."""
        assert self._controller is not None, "the loop was not entered"
        return self._controller

    def enter(self) -> None:
        """The framework is about to enter its loop: from here on the protected state says where. A spare waits."""
        self._controller = self._begin()
        self._controller.leave_between_steps()
        self.go_back()

    def begin(self, draws_as: int) -> None:
        """The unit's forward and backward begin.

        Args:
            draws_as: of which step's random numbers.
        """
        self.is_inside = True
        self.controller.begin(draws_as)

    def commit(self) -> None:
        """The unit is done; the next one is handed out.

        Raises:
            StepInterrupted: the protected state is not that after this unit any more, or was not yet.
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
        """Recovers; the protected state says where to enter the loop. After `enter`, and `is_interruption`."""
        self._hand_out(sys.maxsize)

    def is_interruption(self, error: BaseException) -> bool:
        """Whether an exception that leaves the framework's loop belongs to a failure elsewhere: if so, undoes the unit.

        Args:
            error: the exception.
        """
        controller = self.controller
        if not controller.is_interruption(error):
            return False
        controller.undo()
        self.is_inside = False
        return True

    def run(self, loop: Callable[[], object], put: Callable[[], object]) -> None:
        """Runs the framework's loop until all ranks are at its end, and enters it again where it is interrupted.

        Args:
            loop: the rest of it, from where the protected state says.
            put: gives the framework what the protected state says.
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
        """The framework's loop is at its end, which the protected state says, too.

        Returns:
            whether all ranks are. If not, enter the loop again.
        """
        self.controller.undo()  # the unit that was handed out is not needed
        index = self.controller.next_step(self.index)
        if index is not None:
            self.index = index
        return index is None

    def _hand_out(self, num_steps: int) -> None:
        index = self.controller.next_step(num_steps)
        if index is None:  # the job is drained, and the script handles the signal itself
            raise SystemExit(0)
        self.index = index


def numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """Arguments for `Session.protect`: one thing under the name alone, several under the name with a number each."""
    if len(things) == 1:
        return {name: things[0]}
    return {f"{name}{number}": thing for number, thing in enumerate(things)}


def warn_of_release(framework: str, present: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Warns of a release of a framework for which the tests have not passed. Called where the user's object is made.

    Args:
        framework: its name.
        present: the version that is installed.
        tested: the first release for which they have passed, and the first one behind these.
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
    """Warns of callbacks that keep tensors or modules of their own, such as averaged weights, which nothing restores.

    Args:
        callbacks: those whose state is not protected.
        modules: those that are protected, of which they may keep what they like.
        what_to_do: the end of the warning.
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
