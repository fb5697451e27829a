"""Undoing an interrupted step: everything a forward or backward may have changed goes back to where it was."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.worker.state.protected import ProtectedState


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
        """The same tensors with the same content, whatever a forward assigned, added or took away."""
        self._live.clear()
        self._live.update(self._were)
        for name, buffer in self._were.items():
            if buffer is not None:
                buffer.copy_(self._copies[name])


class StepSnapshot:
    """What a step can change before its update: module buffers, host state, and which gradients there are.

    Parameters and optimizer state are not copied: before the gradient barrier nobody writes to them. The copies are
    allocated once and reused at every step.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._parameters = [tensor for _name, tensor in state.parameters()]
        self._buffers: list[_ModuleBuffers] = [
            _ModuleBuffers(part) for module in state.modules.values() for part in module.modules()
        ]
        self._host: dict[str, Any] = {}
        self._with_gradient: list[torch.Tensor] = []

    def take(self) -> None:
        """Remembers the state at the start of a step."""
        for buffers in self._buffers:
            buffers.take()
        self._host = self._state.step_state()
        self._with_gradient = [parameter for parameter in self._parameters if parameter.grad is not None]

    def put_back(self) -> None:
        """Makes the state what it was at `take`.

        A gradient that existed then had been set to zero, or was about to be: it is zeroed. One that did not is
        dropped, so that an optimizer skips what it would have skipped.
        """
        kept = {id(tensor) for tensor in self._with_gradient}
        with torch.no_grad():
            for buffers in self._buffers:
                buffers.put_back()
            for parameter in self._parameters:
                if parameter.grad is not None and id(parameter) in kept:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        self._state.load_host_state(self._host)
