"""Undoes an interrupted step: restores everything that a forward or backward may have changed."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.freememory import free_bytes
from keepstep.protocol.comparison import COMPARED
from keepstep.weights.memory.blocks import is_dtensor, local_of
from keepstep.weights.memory.bytes_of import byte_view, host_bytes
from keepstep.worker.state.protected import ProtectedState, parameters_of


class _ModuleBuffers:
    """Saves and restores the buffers of one module: the tensor objects and their content."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._live = module._buffers
        self._were: dict[str, torch.Tensor | None] = {}
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def are_any(self) -> bool:
        """Whether the module has buffers, or had them at `take`. Most modules have none."""
        return bool(self._live or self._were)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Records every buffer. Returns pairs (copy, buffer); the caller must copy each buffer into its copy.

        A copy is allocated once and reused as long as the buffer keeps its layout.
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
        """Restores the same tensor objects with the same content, even if a forward assigned, added or removed some."""
        if isinstance(self._live, dict):
            self._live.clear()  # a scripted module has no dict, and always the same buffers
        for name, buffer in self._were.items():
            self._live[name] = buffer
            if buffer is None:
                continue
            copy = self._copies[name]
            if (buffer.shape, buffer.dtype, buffer.stride()) != (copy.shape, copy.dtype, copy.stride()):
                buffer.data = torch.empty_like(copy)  # a forward has resized it
            buffer.copy_(copy)


LEARNING_STEPS = 3
"""More than one, because in the first step a momentum encoder may still equal the encoder that it follows: then a write
does not change the content."""
COPY_SHARE = 1 / 16
"""The copy of all parameters may take this share of the node's free memory: 16 ranks of a node may make one at once."""


_CHECKED_STEPS = 2 * max(COMPARED)
"""In this many steps keepstep checks that the script drops the gradients that an update has used."""


class WrittenParameters:
    """Undoes the script's own writes to parameters, outside of ``optimizer.step()``.

    A repeated step would apply such writes twice. Examples are a momentum encoder that follows the trained one in its
    forward, SAM's ascent step and its reversal before the update, an update without an optimizer, weights that are
    normalised before each forward, and an average after the ``with``. Scripts write to few parameters in this way, and
    copying all parameters at every step would be expensive. So keepstep learns which parameters to copy:

    * In a rank's first steps it copies all parameters to host memory and compares them at the gradient barrier. This
      also finds writes through ``.data``, which torch does not count.
      If the copy is larger than `COPY_SHARE` of the node's free memory, it compares digests instead. They show the same
      writes, but an interrupted step cannot restore a parameter that is first written in it; the rank says so.
    * Later it compares torch's version counter of each tensor, and its address in case the script assigned ``.data``.

    `ProtectedState.written` holds the result. keepstep copies these parameters whenever a step is yielded. Parameters
    that no optimizer trains may be averages. A script may write to those after an interrupted attempt and at the end of
    an epoch, so only `guard` copies them, which costs nothing as long as nothing fails.
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
        """Names of parameters in those protected modules of which no optimizer trains a parameter."""
        self._marks: list[tuple[int, int]] = []
        """(address, version counter) of each parameter when the step was yielded."""
        self._copies: dict[int, torch.Tensor] = {}
        """Index -> copy of a parameter that the script writes to in every step."""
        self._others: dict[int, torch.Tensor] = {}
        """Index -> copy in host memory: of all other parameters while keepstep learns, or of guarded averages."""
        self._digests: dict[int, int] = {}
        """Index -> digest of a parameter, in place of the copies in `_others`."""
        self._is_told = False
        """Whether the rank has said that it has no memory for these copies."""
        self._left_to_learn = LEARNING_STEPS

    def take(self) -> None:
        """Copies the known parameters. Call it when a step is yielded."""
        tensors, marks = self._tensors(), self._read_marks()
        if self._marks:
            moved = [index for index in self._untrained if marks[index] != self._marks[index]]
            self._averages.update(self._named[index][0] for index in moved)
        self._marks = marks
        if written := self._state.written:
            for index, (name, _parameter) in enumerate(self._named):
                if name in written:
                    _copy_into(self._copies, index, tensors[index])
        self._others, self._digests = {}, {}
        if not self._state.knows_written:
            others = {i: tensor for i, tensor in enumerate(tensors) if i not in self._copies}
            if self._has_memory_for(sum(tensor.nbytes for tensor in others.values())):
                self._others = {i: _on_host(tensor) for i, tensor in others.items()}
            else:
                self._digests = {i: _digest(tensor) for i, tensor in others.items()}

    def _has_memory_for(self, num_bytes: int) -> bool:
        if num_bytes <= COPY_SHARE * (free := free_bytes()):
            return True
        if not self._is_told:
            self._is_told = True
            print(
                f"keepstep: this rank does not copy its parameters ({num_bytes / 1e6:.3g} MB) in its first "
                f"{LEARNING_STEPS} steps, because {free / 1e6:.3g} MB of memory are free; it compares digests. "
                "If one of these steps is repeated, what the script writes to parameters in front of optimizer.step() "
                "is not undone",
                file=sys.stderr,
                flush=True,
            )
        return False

    def guard(self) -> None:
        """Copies the averages, before the script may write to them outside of a step."""
        for index, tensor in enumerate(self._tensors()):
            if self._named[index][0] in self._averages and index not in self._copies and index not in self._others:
                self._others[index] = _on_host(tensor)
        self._marks = self._read_marks()

    def before_barrier(self) -> None:
        """Finds the parameters that the script has written to since `take`. Call it when the gradients are complete."""
        tensors, marks, state = self._tensors(), self._read_marks(), self._state
        if state.knows_written and marks == self._marks:
            return
        found = {index for index, mark in enumerate(marks) if mark != self._marks[index]}
        if state.knows_written:
            found.difference_update(self._others)  # where it is guarded, at the end of an epoch, it is not every step
        else:
            found |= {index for index, copy in self._others.items() if not _is_same(tensors[index], copy)}
            found |= {index for index, digest in self._digests.items() if _digest(tensors[index]) != digest}
            self._copies |= {index: self._others[index] for index in found if index in self._others}
            self._others, self._digests = {}, {}
            self._left_to_learn -= 1
            state.knows_written = self._left_to_learn == 0
        state.written |= {self._named[index][0] for index in found}

    def put_back(self) -> None:
        """Restores the parameters of `take`, and the averages of `guard`. Warns of a parameter without a copy."""
        marks = self._read_marks()
        unknown = set()
        for index, tensor in enumerate(self._tensors()):
            copy = self._copies.get(index, self._others.get(index))
            if copy is not None:
                tensor.copy_(copy)
            elif marks[index] != self._marks[index] or self._has_other_digest(index, tensor):
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

    def _has_other_digest(self, index: int, tensor: torch.Tensor) -> bool:
        return index in self._digests and _digest(tensor) != self._digests[index]

    def _tensors(self) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in self._whole] if self._is_sharded else self._whole

    def _read_marks(self) -> list[tuple[int, int]]:
        if not self._is_counted:
            return [(tensor.data_ptr(), 0) for tensor in self._tensors()]
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors()]


class _SpentGradient:
    """A gradient that an update has used. The script must drop or zero it before the next backward."""

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.name, self._parameter = name, parameter
        self._gradient = weakref.ref(parameter.grad)  # it may be dropped
        self._count = local_of(parameter.grad)._version

    @property
    def is_there(self) -> bool:
        """Whether the gradient is unchanged since the update: neither dropped, nor zeroed, nor otherwise written."""
        gradient = self._parameter.grad
        return (
            gradient is not None
            and gradient is self._gradient()
            and local_of(gradient)._version == self._count
            and _has_content(gradient)
        )


class StepSnapshot:
    """Saves and restores the state that a step can change before its update.

    That is module buffers, host state, gradients, ``train()`` or ``eval()``, and ``requires_grad``. Optimizer state is
    not copied: a step does not write to it before the barrier. Parameters are copied only if the script itself writes
    to them (`WrittenParameters`). The copies are allocated once and reused at every step.

    Gradients that an update has used are not copied: the script has zeroed them, or will do so before the next
    backward. Other nonzero gradients are copied: they are from before the first step, or from a step without an update.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._parameters = [tensor for _name, tensor in state.parameters()]
        self._parts = [part for _name, part in state.parts()]
        self._buffers = [_ModuleBuffers(part) for part in self._parts]
        self._written = WrittenParameters(state)
        self._training: list[bool] = []
        self._trained: list[bool] = []
        """``training`` of each module, and ``requires_grad`` of each parameter."""
        self._host: dict[str, Any] = {}
        self._with_gradient: list[torch.Tensor] = []
        self._gradients: dict[int, torch.Tensor] = {}
        """Copies of gradients that no update has used, by the identity of their parameter."""
        self._num_taken = 0
        self._spent: list[_SpentGradient] = []
        """The gradients at `take` that an update has used."""
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
            UsageError: the script has added parameters to an optimizer.
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
        """Checks that the backward will not accumulate onto a used gradient, because keepstep does not restore it.

        Call it when a backward begins.

        Raises:
            UsageError: a gradient that the update of an earlier step has used has not been dropped or zeroed.
        """
        if len(self._state.optimizers) != 1:
            return  # with several optimizers, a script may drop a gradient as late as before that optimizer's update
        for spent in self._spent:
            if spent.is_there:
                raise UsageError(
                    f"the gradient of {spent.name} that an earlier step's update has used is still there where "
                    "backward() begins, which adds to it; a step that comes again would begin without it. Call "
                    "optimizer.zero_grad() in each step"
                )

    def before_barrier(self) -> None:
        """Finds the parameters that the script has written to. Call it when the gradients are complete."""
        self._written.before_barrier()

    def guard(self) -> None:
        """Protects averages of parameters, which the script may write to outside of steps, until the next `take`."""
        self._written.guard()

    def put_back_modes(self) -> None:
        """Restores ``train()``/``eval()`` and ``requires_grad`` of `take`."""
        for part, training in zip(self._parts, self._training, strict=True):
            part.training = training
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            parameter.requires_grad_(trained)

    def put_back(self) -> None:
        """Restores the state of `take`.

        A gradient that existed then is restored from its copy, if there is one. Without a copy, it is zeroed, or stays
        None if the script has dropped it. A gradient that did not exist then is dropped, so that the optimizer skips
        the same parameters.

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
    """Copies the second tensor of each pair into the first, with one torch call for all pairs if possible."""
    plain = [pair for pair in pairs if not is_dtensor(pair[1])]
    if plain:
        targets, sources = zip(*plain, strict=True)
        torch._foreach_copy_(targets, sources)
    for target, source in pairs:
        if is_dtensor(source):
            target.copy_(source)


def _in_modules_without(trained: set[int], state: ProtectedState) -> set[str]:
    """Names of the parameters in protected modules without any trained parameter.

    Args:
        trained: ``id()`` of each trained parameter.
        state: the protected objects.
    """
    untrained = [
        {id(parameter) for parameter in module.parameters()}
        for module in state.modules.values()
        if trained.isdisjoint(id(parameter) for parameter in module.parameters())
    ]
    return {name for name, parameter in state.parameters() if any(id(parameter) in ids for ids in untrained)}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(host_bytes(tensor.detach()))


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return torch.equal(byte_view(tensor.detach().cpu()), byte_view(copy))


def _copy_into(copies: dict[int, torch.Tensor], index: int, tensor: torch.Tensor) -> None:
    """Copies a tensor on its own device. Reuses the memory of the former copy if its layout matches."""
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
        parameter.grad.copy_(content)  # in place: it may be a view of a gradient bucket
