"""Classifies NCCL errors: a broken connection, a timeout, or an invalid call.

Torch raises a ``DistBackendError`` with NCCL's words for its result codes (``ncclGetErrorString`` in NCCL's init.cc);
whether the watchdog has given an operation up is asked of the group (``ProcessGroupNCCL::getError``).
"""

from __future__ import annotations

from typing import Final

from keepstep.worker.backends.communicator import CommunicatorAborted, FailureCause

RAISED: Final = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What torch's C++ errors become in Python."""

OF_A_CONNECTION: Final = (
    "NCCL communicator was aborted",  # `NCCLComm::getNcclComm` in torch's NCCLUtils.cpp
    "remote process exited or there was a network error",  # ncclRemoteError
    "unhandled system error",  # ncclSystemError: a socket, mostly
)


class OperationTimedOut(RuntimeError):
    """A peer did not come to an operation within its timeout."""


class CommunicatorBroken(RuntimeError):
    """NCCL has found that a peer is gone, or that its own connection is broken."""


def cause_of(error: Exception) -> FailureCause:
    """Tells why an operation has failed. An error of CUDA's is one of the call: the process cannot go on."""
    if isinstance(error, OperationTimedOut):
        return FailureCause.DEADLINE
    if isinstance(error, (CommunicatorAborted, CommunicatorBroken)):
        return FailureCause.CONNECTION
    message = str(error)
    return FailureCause.CONNECTION if any(words in message for words in OF_A_CONNECTION) else FailureCause.CALL
