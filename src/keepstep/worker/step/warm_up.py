"""Warm-up of a spare, so that it computes at full speed as soon as it has a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from keepstep.worker.state.protected import ProtectedState

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes in which cuBLAS multiplies matrices."""
_SIZE = 256
"""Rows and columns of the matrices: they use a common kernel and take almost no time."""


def warm_up(state: ProtectedState, function: Callable[[], object]) -> None:
    """Warms up a spare: calls the script's function, and allocates gradients and optimizer state.

    It allocates them by one update on zero gradients. The state of the spare is overwritten when it takes a rank.
    Restoring 80 MB of Adam state into memory that had never been touched took twice as long (20,000 page faults; 2
    cores, November 2026). On a GPU torch's allocator keeps the memory of the gradients, and cuBLAS and its kernels are
    loaded even without a function of the script. The device is idle when it returns.

    Args:
        state: the protected objects.
        function: the script's function, see `Session.warm_up`.
    """
    device = state.device
    if device.type == "cuda":
        dtypes = {parameter.dtype for _name, parameter in state.parameters()} | {torch.get_autocast_dtype("cuda")}
        multiply(device, [dtype for dtype in _DTYPES if dtype in dtypes])
    function()
    state.place_gradients(tuple(range(len(state.parameters()))))
    for optimizer in state.optimizers.values():
        optimizer.step()
    state.place_gradients(())
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiply(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """Multiplies matrices as a forward and backward do, to open a device and load cuBLAS with its workspace.

    It draws no random numbers, and returns the memory of the matrices to torch's allocator.
    """
    for dtype in dtypes:
        inputs = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
        weights = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device, requires_grad=True)
        torch.nn.functional.linear(inputs, weights).mean().backward()
