"""Warm-up of a spare, so that it computes at full speed as soon as it has a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from keepstep.weights.memory.blocks import local_of
from keepstep.worker.state.protected import ProtectedState

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes in which cuBLAS multiplies matrices."""
_SIZE = 256
"""Rows and columns of the matrices: they use a common kernel and take almost no time."""


def warm_up(state: ProtectedState, function: Callable[[], object]) -> None:
    """Warms up a spare: calls the script's function, and has memory allocated for gradients and optimizer state.

    Nothing of the script's is called but that function. So the memory is allocated for as much as optimizers of this
    kind keep, written to, and freed: the process, or torch's allocator on a GPU, keeps it for the restore. Restoring 80
    MB of Adam state into memory that had never been touched took twice as long (20,000 page faults; 2 cores, November
    2026). Then the first update of a process is made with a tensor of keepstep's own, since torch imports its compiler
    in it (a second). On a GPU cuBLAS and its kernels are loaded even without a function of the script. The device is
    idle when it returns.

    Args:
        state: the protected objects.
        function: the script's function, see `Session.warm_up`.
    """
    device = state.device
    if device.type == "cuda":
        dtypes = {parameter.dtype for _name, parameter in state.parameters()} | {torch.get_autocast_dtype("cuda")}
        multiply(device, [dtype for dtype in _DTYPES if dtype in dtypes])
    function()
    touch(state)
    update(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def touch(state: ProtectedState) -> None:
    """Allocates, writes to and frees as much memory as gradients and optimizer state will take, as far as known.

    If there is not as much, the restore allocates it.
    """
    memory = []
    with contextlib.suppress(torch.OutOfMemoryError):
        for optimizer in state.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in (each for each in group["params"] if each.requires_grad):
                    copies = [torch.zeros_like(local_of(parameter).detach()) for _ in range(1 + num_moments(group))]
                    memory.extend(copies)


def num_moments(group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size optimizers keep that have such a parameter group, by their settings."""
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return sum(bool(group.get(name)) for name in ("momentum", "alpha", "centered"))


def update(device: torch.device) -> None:
    """Makes an update of a tensor of its own, without an optimizer, whose hooks would be called."""
    tensors = [torch.zeros(1, device=device) for _ in range(4)]
    parameter, gradient, first, second = ([each] for each in tensors)
    with torch.no_grad():
        adamw(
            parameter, gradient, first, second, [], [torch.zeros(())], amsgrad=False, beta1=0.9, beta2=0.99, lr=0.1,
            weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip


def multiply(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """Multiplies matrices as a forward and backward do, to open a device and load cuBLAS with its workspace.

    It draws no random numbers, and returns the memory of the matrices to torch's allocator.
    """
    for dtype in dtypes:
        inputs = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
        weights = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device, requires_grad=True)
        torch.nn.functional.linear(inputs, weights).mean().backward()
