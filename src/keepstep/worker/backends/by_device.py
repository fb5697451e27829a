"""Which backend carries tensors of which device."""

from __future__ import annotations

from typing import Final

from keepstep.worker.backends.communicator import CommunicatorFactory
from keepstep.worker.backends.gloo.communicator import GlooCommunicator

BACKENDS: Final[dict[str, CommunicatorFactory]] = {"cpu": GlooCommunicator}
"""By the type of a `torch.device`."""
