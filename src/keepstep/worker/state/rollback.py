"""Undoing an interrupted step: everything a forward or backward may have changed goes back to where it was."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.worker.state.protected import ProtectedState


class StepSnapshot:
    """What a step can change before its update: module buffers, host state, and which gradients there are.

    Parameters and optimizer state are not copied: before the gradient barrier nobody writes to them. The copies are
    allocated once and reused at every step.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._parameters = [tensor for _name, tensor in state.parameters()]
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host: dict[str, Any] = {}
        self._with_gradient: list[torch.Tensor] = []

    def take(self) -> None:
        """Remembers the state at the start of a step."""
        buffers = [tensor for _name, tensor in self._state.buffers()]
        if [id(buffer) for buffer in buffers] != [id(buffer) for buffer, _copy in self._buffers]:
            self._buffers = [(buffer, torch.empty_like(buffer)) for buffer in buffers]
        with torch.no_grad():
            for buffer, copy in self._buffers:
                copy.copy_(buffer)
        self._host = self._state.step_state()
        self._with_gradient = [parameter for parameter in self._parameters if parameter.grad is not None]

    def put_back(self) -> None:
        """Makes the state what it was at `take`.

        A gradient that existed then had been set to zero, or was about to be: it is zeroed. One that did not is
        dropped, so that an optimizer skips what it would have skipped.
        """
        kept = {id(tensor) for tensor in self._with_gradient}
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
            for parameter in self._parameters:
                if parameter.grad is not None and id(parameter) in kept:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        self._state.load_host_state(self._host)
