"""Maps devices to backends."""

from __future__ import annotations

from typing import Final

import torch
from torch import distributed as dist

from keepstep import config
from keepstep.worker.backends.communicator import CommunicatorFactory
from keepstep.worker.backends.gloo.communicator import GlooCommunicator
from keepstep.worker.backends.nccl.communicator import NcclCommunicator
from keepstep.worker.backends.nccl.device import CudaDevice

CPU: Final = "cpu"
"""The type of device whose tensors every group carries."""


def backends_of(device: torch.device) -> dict[str, CommunicatorFactory]:
    """Returns the backends of a process, by the type of `torch.device` whose tensors each one carries; the CPU's first.

    NCCL carries tensors on a GPU if torch was built with it, unless ``KEEPSTEP_GPU_BACKEND=gloo``; else gloo does.

    Args:
        device: the process's own device.
    """
    backends: dict[str, CommunicatorFactory] = {CPU: GlooCommunicator}
    if device.type == "cuda" and nccl_version():
        backends[device.type] = lambda name, observer, _host: NcclCommunicator(name, observer, CudaDevice(device))
    elif device.type != CPU:
        backends[device.type] = GlooCommunicator
    return backends


def nccl_version() -> tuple[int, ...]:
    """The version of NCCL that carries tensors on a GPU; empty if gloo carries them."""
    return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() and not config.forces_gloo() else ()
