"""Undoes an interrupted step: restores everything that a forward or backward may have changed."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.weights.memory.blocks import is_dtensor, local_of
from keepstep.weights.memory.bytes_of import byte_view
from keepstep.worker.state.layout import COMPARED_AGAIN
from keepstep.worker.state.protected import ProtectedState, parameters_of


class _ModuleBuffers:
    """The buffers of one module: which tensors they are, and what was in them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._live = module._buffers
        self._were: dict[str, torch.Tensor | None] = {}
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def are_any(self) -> bool:
        """Whether there are buffers, or were: most modules have none."""
        return bool(self._live or self._were)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Remembers every buffer; gives pairs of a copy, yet to be written, and the buffer.

        The copies are allocated once, for as long as a buffer keeps its layout.
        """
        self._were = dict(self._live)
        pairs = []
        for name, buffer in self._were.items():
            if buffer is None:
                continue
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (buffer.shape, buffer.dtype, buffer.stride()):
                copy = self._copies[name] = torch.empty_like(buffer)
            pairs.append((copy, buffer.detach()))
        return pairs

    def put_back(self) -> None:
        """The same tensors with the same content, also where a forward assigned, added or removed some."""
        self._live.clear()
        self._live.update(self._were)
        for name, buffer in self._were.items():
            if buffer is not None:
                buffer.copy_(self._copies[name])


LEARNING_STEPS = 3
"""In the first one a momentum encoder may still be equal to the one that it follows, and what is written changes
nothing."""


_CHECKED_STEPS = 2 * max(COMPARED_AGAIN)
"""In so many it is noted which gradients an update has used, to see whether the script drops them."""


class WrittenParameters:
    """Undoes what the script itself writes to parameters, where no ``optimizer.step()`` does it.

    A repeated step would apply these twice: a momentum encoder that follows the trained one in its forward, SAM's
    ascent step and its reversal before the update, an update without an optimizer, weights that are normalised before
    each forward, an average after the ``with``. But scripts write to few parameters in this way, and copying all of
    them at every step would be expensive. So keepstep learns which ones:

    * in a rank's first steps all are copied, into host memory, and compared at the gradient barrier: that finds also
      what is written through ``.data``, of which torch keeps no count;
    * from then on by torch's count of the writes to each tensor, and by its address, where ``.data`` was assigned.

    `ProtectedState.written` has the result; these are copied whenever a step is yielded. Parameters that no optimizer
    trains may be averages, which a script also writes to after an interrupted attempt and at the end of an epoch. Only
    `guard` copies them, which costs nothing while nothing fails.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._named = state.parameters()
        trained = {id(p) for optimizer in state.optimizers.values() for p in parameters_of(optimizer)}
        self._untrained = [index for index, (_name, each) in enumerate(self._named) if id(each) not in trained]
        self._whole = [parameter for _name, parameter in self._named]
        self._is_sharded = any(is_dtensor(parameter) for parameter in self._whole)
        self._is_counted = not any(parameter.is_inference() for _name, parameter in self._named)
        self._averages = _in_modules_without(trained, state)
        """Names of the parameters in protected modules of which no optimizer trains any."""
        self._marks: list[tuple[int, int]] = []
        """Of each parameter, when the step was handed out: its address, and the count of writes to it."""
        self._copies: dict[int, torch.Tensor] = {}
        """By index: of those that are written to in every step."""
        self._others: dict[int, torch.Tensor] = {}
        """In host memory: of the rest while it is learned which are written to, or of what is guarded."""
        self._left_to_learn = LEARNING_STEPS

    def take(self) -> None:
        """A step is handed out."""
        tensors, marks = self._tensors(), self._read_marks()
        if self._marks:
            moved = [index for index in self._untrained if marks[index] != self._marks[index]]
            self._averages.update(self._named[index][0] for index in moved)
        self._marks = marks
        if written := self._state.written:
            for index, (name, _parameter) in enumerate(self._named):
                if name in written:
                    _copy_into(self._copies, index, tensors[index])
        self._others = {}
        if not self._state.knows_written:
            self._others = {i: _on_host(tensor) for i, tensor in enumerate(tensors) if i not in self._copies}

    def guard(self) -> None:
        """What the script is about to write to averages may have to be undone."""
        for index, tensor in enumerate(self._tensors()):
            if self._named[index][0] in self._averages and index not in self._copies and index not in self._others:
                self._others[index] = _on_host(tensor)
        self._marks = self._read_marks()

    def before_barrier(self) -> None:
        """The gradients are complete: what was written to since `take` is what a step writes to by itself."""
        tensors, marks, state = self._tensors(), self._read_marks(), self._state
        if state.knows_written and marks == self._marks:
            return
        found = {index for index, mark in enumerate(marks) if mark != self._marks[index]}
        if state.knows_written:
            found.difference_update(self._others)  # where it is guarded, at the end of an epoch, it is not every step
        else:
            found |= {index for index, copy in self._others.items() if not _is_same(tensors[index], copy)}
            self._copies |= {index: self._others[index] for index in found if index in self._others}
            self._others = {}
            self._left_to_learn -= 1
            state.knows_written = self._left_to_learn == 0
        state.written |= {self._named[index][0] for index in found}

    def put_back(self) -> None:
        """Makes the parameters what they were at `take`, and averages what they were at `guard`."""
        marks = self._read_marks()
        unknown = set()
        for index, tensor in enumerate(self._tensors()):
            copy = self._copies.get(index, self._others.get(index))
            if copy is not None:
                tensor.copy_(copy)
            elif marks[index] != self._marks[index]:
                unknown.add(self._named[index][0])
        self._marks = self._read_marks()
        if unknown:
            print(
                f"keepstep: the script has written to {_few(unknown)} in front of optimizer.step(), for the first time "
                "in the step that is repeated, so there is no copy of its former content: the repeated step may "
                "differ. From now on every step copies it",
                file=sys.stderr,
                flush=True,
            )
            self._state.written |= unknown

    def _tensors(self) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in self._whole] if self._is_sharded else self._whole

    def _read_marks(self) -> list[tuple[int, int]]:
        if not self._is_counted:
            return [(tensor.data_ptr(), 0) for tensor in self._tensors()]
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors()]


class _SpentGradient:
    """A gradient that an update has used, which has to be dropped or set to zero before the next backward."""

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.name, self._parameter = name, parameter
        self._gradient = weakref.ref(parameter.grad)  # it may be dropped
        self._count = local_of(parameter.grad)._version

    @property
    def is_there(self) -> bool:
        """Whether nothing was written to it since, not even zeros."""
        gradient = self._parameter.grad
        return (
            gradient is not None
            and gradient is self._gradient()
            and local_of(gradient)._version == self._count
            and _has_content(gradient)
        )


class StepSnapshot:
    """What a step can change before its update: module buffers, host state, gradients, and what is switched on and
    off in the model: ``train()`` and ``eval()``, ``requires_grad``.

    Optimizer state is not copied: a step does not write to it before its barrier. Of parameters those are that the
    script writes to by itself (`WrittenParameters`). The copies are allocated once and reused at every step.

    Nor are gradients copied that an update has used: they were set to zero since, or will be before the next
    backward. Others are, unless they are zero: they came from before the first step, or from one without an update.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._parameters = [tensor for _name, tensor in state.parameters()]
        self._parts = [part for _name, part in state.parts()]
        self._buffers = [_ModuleBuffers(part) for part in self._parts]
        self._written = WrittenParameters(state)
        self._training: list[bool] = []
        self._trained: list[bool] = []
        """Of each part, and of each parameter."""
        self._host: dict[str, Any] = {}
        self._with_gradient: list[torch.Tensor] = []
        self._gradients: dict[int, torch.Tensor] = {}
        """Copies of gradients that no update has used, by the identity of their parameter."""
        self._num_taken = 0
        self._spent: list[_SpentGradient] = []
        """At `take`."""
        self._used: set[int] = set()
        """The parameters that were updated since `take`, by their identity."""
        for optimizer in state.optimizers.values():
            self._note_updates_of(optimizer)

    def _note_updates_of(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = frozenset(id(parameter) for parameter in parameters_of(optimizer))
        optimizer.register_step_post_hook(lambda _optimizer, _arguments, _keywords: self._used.update(parameters))

    def take(self) -> None:
        """Remembers the state at the start of a step.

        Raises:
            UsageError: an optimizer has got other parameters than it had.
        """
        self._state.refuse_added_parameters()
        _copy([pair for buffers in self._buffers if buffers.are_any for pair in buffers.take()])
        self._written.take()
        self._training = [part.training for part in self._parts]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._host = self._state.step_state()
        self._with_gradient = [parameter for parameter in self._parameters if parameter.grad is not None]
        self._gradients = {}  # before the new ones are allocated
        if self._with_gradient:
            self._gradients = self._unused_gradients()
        self._num_taken += 1
        named = self._state.parameters() if self._used and self._num_taken <= _CHECKED_STEPS else []
        self._spent = [_SpentGradient(name, p) for name, p in named if p.grad is not None and id(p) in self._used]
        self._used.clear()

    def _unused_gradients(self) -> dict[int, torch.Tensor]:
        unused = [parameter for parameter in self._with_gradient if id(parameter) not in self._used]
        gradients = [(id(parameter), parameter.grad) for parameter in unused]
        return {key: grad.detach().clone() for key, grad in gradients if grad is not None and _has_content(grad)}

    def check_gradients(self) -> None:
        """A backward begins. What an update has used must not be added to, for it is not restored.

        Raises:
            UsageError: a gradient that the update of a former step has used is still there.
        """
        if len(self._state.optimizers) != 1:
            return  # one may be left as it is by its own update, and dropped before its next one
        for spent in self._spent:
            if spent.is_there:
                raise UsageError(
                    f"the gradient of {spent.name} that an earlier step's update has used is still there where "
                    "backward() begins, which adds to it; a step that comes again would begin without it. Call "
                    "optimizer.zero_grad() in each step"
                )

    def before_barrier(self) -> None:
        """The gradients are complete: takes note of what the step has written to by itself."""
        self._written.before_barrier()

    def guard(self) -> None:
        """From here until the next `take` the script may write to averages of parameters, as no step sees it."""
        self._written.guard()

    def put_back_modes(self) -> None:
        """Switches the model back to what it was at `take`."""
        for part, training in zip(self._parts, self._training, strict=True):
            part.training = training
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            parameter.requires_grad_(trained)

    def put_back(self) -> None:
        """Makes the state what it was at `take`.

        A gradient that existed then gets its content back if there is a copy, else it had been set to zero, or was
        about to be: it is zeroed, or stays away if it was dropped. One that did not exist is dropped, so that an
        optimizer skips what it would have skipped.

        Raises:
            UsageError: as for `take`.
        """
        self._state.refuse_added_parameters()
        self.put_back_modes()
        kept = {id(tensor) for tensor in self._with_gradient}
        with torch.no_grad():
            for buffers in self._buffers:
                buffers.put_back()
            self._written.put_back()
            for parameter in self._parameters:
                if id(parameter) in self._gradients:
                    _put_back_gradient(parameter, self._gradients[id(parameter)])
                elif parameter.grad is not None and id(parameter) in kept:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        self._state.load_host_state(self._host)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first: in one call of torch's, where there may be hundreds."""
    plain = [pair for pair in pairs if not is_dtensor(pair[1])]
    if plain:
        targets, sources = zip(*plain, strict=True)
        torch._foreach_copy_(targets, sources)
    for target, source in pairs:
        if is_dtensor(source):
            target.copy_(source)


def _in_modules_without(trained: set[int], state: ProtectedState) -> set[str]:
    """The names of the parameters in protected modules that hold none of these, by their identity."""
    untrained = [
        {id(parameter) for parameter in module.parameters()}
        for module in state.modules.values()
        if trained.isdisjoint(id(parameter) for parameter in module.parameters())
    ]
    return {name for name, parameter in state.parameters() if any(id(parameter) in ids for ids in untrained)}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return torch.equal(byte_view(tensor.detach().cpu()), byte_view(copy))


def _copy_into(copies: dict[int, torch.Tensor], index: int, tensor: torch.Tensor) -> None:
    """Copies beside the tensor, into the memory of the former copy where that fits."""
    copy = copies.get(index)
    if copy is None or (copy.shape, copy.dtype, copy.device) != (tensor.shape, tensor.dtype, tensor.device):
        copies[index] = tensor.detach().clone()
    else:
        copy.copy_(tensor.detach())


def _few(names: set[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more parameters" if rest else first


def _has_content(gradient: torch.Tensor) -> bool:
    own = local_of(gradient)
    values = own.coalesce().values() if own.is_sparse else own
    return bool(values.any())


def _put_back_gradient(parameter: torch.Tensor, content: torch.Tensor) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = content
    else:
        parameter.grad.copy_(content)  # in its place: it may be a view of a gradient bucket
