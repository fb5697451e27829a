"""Undoing an interrupted step: everything a forward or backward may have changed goes back to where it was."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.weights.memory.blocks import local_of
from keepstep.worker.state.protected import ProtectedState, parameters_of


class _ModuleBuffers:
    """The buffers of one module: which tensors they are, and what was in them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._live = module._buffers
        self._were: dict[str, torch.Tensor | None] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        """Remembers every buffer; the copies are allocated once, for as long as a buffer keeps its layout."""
        self._were = dict(self._live)
        for name, buffer in self._were.items():
            if buffer is None:
                continue
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (buffer.shape, buffer.dtype, buffer.stride()):
                copy = self._copies[name] = torch.empty_like(buffer)
            copy.copy_(buffer.detach())

    def put_back(self) -> None:
        """The same tensors with the same content, also where a forward assigned, added or removed some."""
        self._live.clear()
        self._live.update(self._were)
        for name, buffer in self._were.items():
            if buffer is not None:
                buffer.copy_(self._copies[name])


class StepSnapshot:
    """What a step can change before its update: module buffers, host state, gradients, and what is switched on and
    off in the model: ``train()`` and ``eval()``, ``requires_grad``.

    Parameters and optimizer state are not copied: a step does not write to them before its barrier. The copies are
    allocated once and reused at every step.

    Nor are gradients copied that an update has used: they were set to zero since, or will be before the next
    backward. Others are, unless they are zero: they came from before the first step, or from one without an update.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._parameters = [tensor for _name, tensor in state.parameters()]
        self._parts = [part for _name, part in state.parts()]
        self._buffers = [_ModuleBuffers(part) for part in self._parts]
        self._training: list[bool] = []
        self._trained: list[bool] = []
        """Of each part, and of each parameter."""
        self._host: dict[str, Any] = {}
        self._with_gradient: list[torch.Tensor] = []
        self._gradients: dict[int, torch.Tensor] = {}
        """Copies of gradients that no update has used, by the identity of their parameter."""
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
        for buffers in self._buffers:
            buffers.take()
        self._training = [part.training for part in self._parts]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._host = self._state.step_state()
        self._with_gradient = [parameter for parameter in self._parameters if parameter.grad is not None]
        self._gradients = {}  # before the new ones are allocated
        if self._with_gradient:
            self._gradients = self._unused_gradients()
        self._used.clear()

    def _unused_gradients(self) -> dict[int, torch.Tensor]:
        unused = [parameter for parameter in self._with_gradient if id(parameter) not in self._used]
        gradients = [(id(parameter), parameter.grad) for parameter in unused]
        return {key: grad.detach().clone() for key, grad in gradients if grad is not None and _has_content(grad)}

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
            for parameter in self._parameters:
                if id(parameter) in self._gradients:
                    _put_back_gradient(parameter, self._gradients[id(parameter)])
                elif parameter.grad is not None and id(parameter) in kept:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        self._state.load_host_state(self._host)


def _has_content(gradient: torch.Tensor) -> bool:
    own = local_of(gradient)
    values = own.coalesce().values() if own.is_sparse else own
    return bool(values.any())


def _put_back_gradient(parameter: torch.Tensor, content: torch.Tensor) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = content
    else:
        parameter.grad.copy_(content)  # in its place: it may be a view of a gradient bucket
