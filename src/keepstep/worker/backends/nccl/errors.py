"""Classifies NCCL errors: a broken connection, a timeout, or an invalid call.

Torch raises a ``DistBackendError`` with NCCL's words for its result codes (``ncclGetErrorString`` in NCCL's init.cc).
The group reports whether the watchdog has given an operation up (``ProcessGroupNCCL::getError``).
"""

from __future__ import annotations

from typing import Final

from keepstep.worker.backends.communicator import CommunicatorAborted, FailureCause

RAISED: Final = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""The types in Python of errors of torch's C++ code."""

OF_A_CONNECTION: Final = (
    "NCCL communicator was aborted",  # `NCCLComm::getNcclComm` in torch's NCCLUtils.cpp
    "remote process exited or there was a network error",  # ncclRemoteError
    "unhandled system error",  # ncclSystemError: a socket, mostly
)


class OperationTimedOut(RuntimeError):
    """A peer did not take part in an operation within its timeout."""


class CommunicatorBroken(RuntimeError):
    """NCCL has found that a peer is gone, or that its own connection is broken."""


def cause_of(error: Exception) -> FailureCause:
    """Returns why an operation has failed. A CUDA error counts as one of the call: the process cannot continue."""
    if isinstance(error, OperationTimedOut):
        return FailureCause.DEADLINE
    if isinstance(error, (CommunicatorAborted, CommunicatorBroken)):
        return FailureCause.CONNECTION
    message = str(error)
    return FailureCause.CONNECTION if any(words in message for words in OF_A_CONNECTION) else FailureCause.CALL
