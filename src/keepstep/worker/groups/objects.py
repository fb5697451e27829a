"""Information that a group takes from its calling torch function: about Python objects, and batches.

torch's `broadcast_object_list` and `scatter_object_list` ask the group for its rank to decide whether they send or
receive, and a receiver unpickles the result. Without a received object that would be uninitialised memory.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import c10d_logger

from keepstep.errors import PeerLost

_RECEIVING = frozenset(
    inspect.unwrap(function).__code__ for function in (dist.broadcast_object_list, dist.scatter_object_list)
)
_LOGGING = frozenset({c10d_logger._get_msg_dict.__code__})
_BATCHING = frozenset({inspect.unwrap(dist.batch_isend_irecv).__code__})
_DTYPES = frozenset({torch.long, torch.uint8})
"""The dtypes of the sizes of pickled objects, and of the objects."""
_PASSED_THROUGH = ("torch.distributed", "keepstep.worker.groups")
"""Modules whose frames lie between these functions and a group. Unpickling an object runs code of none of them."""


def is_asked_by_receiver() -> bool:
    """Whether one of the two functions asks for the rank, to decide whether it sends or receives."""
    return caller(_RECEIVING) is not None


def is_asked_by_log() -> bool:
    """Whether torch asks for the rank to log an exception."""
    return caller(_LOGGING) is not None


def clear_for_receiver(tensors: list[Tensor]) -> None:
    """Zeroes the tensors in which one of the two functions receives, in case nothing arrives."""
    if tensors and tensors[0].dtype in _DTYPES and _is_receiver(caller(_RECEIVING)):
        for tensor in tensors:
            tensor.zero_()


def refuse_unpickling(group: str, why: str) -> None:
    """Stops one of the two functions before it unpickles bytes that no rank has sent. The sending rank may continue.

    Raises:
        PeerLost: on a receiving rank, with the function, the group and the reason.
    """
    frame = caller(_RECEIVING)
    if frame is not None and _is_receiver(frame):
        raise PeerLost(f"{frame.f_code.co_name} on group {group}: {why}")


def more_follow() -> bool:
    """Whether `batch_isend_irecv` is calling, and more operations of its list follow."""
    frame = caller(_BATCHING)
    operations = frame.f_locals.get("p2p_op_list") if frame is not None else None
    return bool(operations) and frame.f_locals.get("p2p_op") is not operations[-1]  # type: ignore[union-attr,index]  # there are operations


def _is_receiver(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_locals.get("my_group_rank") != frame.f_locals.get("group_src")


def caller(functions: frozenset[CodeType]) -> FrameType | None:
    """Returns the frame of one of torch's ``functions``, from the caller of the calling function outwards; or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_PASSED_THROUGH):
        if frame.f_code in functions:
            return frame
        frame = frame.f_back
    return None
