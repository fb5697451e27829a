"""Warm-up of a spare, so that it computes at full speed as soon as it has a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from keepstep.worker.state.protected import ProtectedState

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""In which cuBLAS multiplies matrices."""
_SIZE = 256
"""Rows and columns of a matrix that takes a usual kernel, and no time."""


def warm_up(state: ProtectedState, function: Callable[[], object]) -> None:
    """Has a spare do what the script wants it to, and takes the memory of gradients and optimizer state: one update on
    zero gradients.

    What both write is overwritten when the spare takes a rank. Restoring 80 MB of Adam state into memory that had never
    been touched took twice as long (20,000 page faults; 2 cores, November 2026). On a GPU torch's allocator keeps the
    memory of the gradients, and a script that gives no function has at least cuBLAS and its kernels loaded. Nothing
    runs on the device any more when it returns.

    Args:
        state: the protected objects.
        function: the script's, see `Session.warm_up`.
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
    """Multiplies matrices as a forward and backward do, which opens a device and loads cuBLAS, with its workspace.

    No random numbers are drawn, and the matrices' memory goes back to torch's allocator.
    """
    for dtype in dtypes:
        inputs = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
        weights = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device, requires_grad=True)
        torch.nn.functional.linear(inputs, weights).mean().backward()
