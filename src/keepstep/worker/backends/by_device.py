"""Which backend carries tensors of which device."""

from __future__ import annotations

from typing import Final

import torch

from keepstep.worker.backends.communicator import CommunicatorFactory
from keepstep.worker.backends.gloo.communicator import GlooCommunicator

CPU: Final = "cpu"
"""The type of the device of which every group carries tensors."""


def backends_of(device: torch.device) -> dict[str, CommunicatorFactory]:
    """The backends of a process, by the type of the `torch.device` whose tensors each one carries; the CPU's first.

    Args:
        device: the process's own.
    """
    backends: dict[str, CommunicatorFactory] = {CPU: GlooCommunicator}
    if device.type != CPU:
        backends[device.type] = GlooCommunicator
    return backends
