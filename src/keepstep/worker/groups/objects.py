"""Information that a group takes from its calling torch function: about Python objects, and batches.

Torch sends a Python object by two operations: one for its size, one for its pickled bytes. A failure in one of them
or between them must not give `pickle` bytes that nothing has filled, or a part of them. So the gathering functions then
give this rank's own object in every place, as echo does, and the receiving functions raise an error.

torch's `broadcast_object_list` and `scatter_object_list` ask the group for its rank to decide whether they send or
receive.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import torch
from torch import Tensor
from torch import distributed as dist
from torch._logging import _internal as torch_logging
from torch.distributed import c10d_logger

from keepstep.errors import ConfigurationError, PeerLost


def _codes(*functions: Callable[..., object]) -> frozenset[CodeType]:
    return frozenset(inspect.unwrap(function).__code__ for function in functions)


_ASKING = _codes(dist.broadcast_object_list, dist.scatter_object_list)
_RECEIVING = _ASKING | _codes(dist.recv_object_list)
_GATHERING_FOR_ONE = _codes(dist.gather_object)
_GATHERING = _GATHERING_FOR_ONE | _codes(dist.all_gather_object)
_RANK, _SOURCE, _DESTINATION = "my_group_rank", "group_src", "group_dst"
_SIZES, _OWN_SIZE = "object_sizes_tensor", "local_size"
_OPERATION, _OPERATIONS = "p2p_op", "p2p_op_list"
_LOGGING = frozenset({c10d_logger._get_msg_dict.__code__})
_PREFIXING = _codes(torch_logging.TorchLogsFormatter.format, torch_logging.LazyTraceHandler.emit)
_BATCHING = _codes(dist.batch_isend_irecv)
_VARIABLES: dict[CodeType, tuple[str, ...]] = {
    **dict.fromkeys(_RECEIVING, (_SOURCE,)),
    **dict.fromkeys(_ASKING, (_RANK, _SOURCE)),
    **dict.fromkeys(_GATHERING, (_SIZES, _OWN_SIZE)),
    **dict.fromkeys(_GATHERING_FOR_ONE, (_RANK, _DESTINATION, _SIZES, _OWN_SIZE)),
    **dict.fromkeys(_BATCHING, (_OPERATION, _OPERATIONS)),
}
"""Torch's functions -> the variables of theirs that are read here."""
_DTYPES = frozenset({torch.long, torch.uint8})
"""The dtypes of the sizes of pickled objects, and of the objects."""
_PASSED_THROUGH = ("torch.distributed", "torch.overrides", "torch._logging", "keepstep.worker")
"""Modules whose frames lie between these functions and a group. Unpickling an object runs code of none of them."""


def check_variables() -> None:
    """Checks that torch's functions have the variables that are read here, or a receiver would pass for a sender.

    Raises:
        ConfigurationError: one is missing: torch is another one than those that keepstep was tested with.
    """
    for code, names in _VARIABLES.items():
        if missing := set(names) - {*code.co_varnames, *code.co_cellvars}:
            raise ConfigurationError(
                f"torch {torch.__version__}: {code.co_name}() has no variable {min(missing)}, which keepstep "
                "reads: install a release of torch that this release of keepstep was tested with"
            )


def is_asked_by_receiver() -> bool:
    """Whether one of the two functions asks for the rank, to decide whether it sends or receives."""
    return caller(_ASKING) is not None


def is_asked_by_log() -> bool:
    """Whether torch asks for the rank to log an exception."""
    return caller(_LOGGING) is not None


def is_asked_for_prefix() -> bool:
    """Whether torch's logs ask for the rank: for the beginning of a line, or for the name of a file."""
    return caller(_PREFIXING) is not None


def clear_for_receiver(tensors: list[Tensor]) -> None:
    """Zeroes the tensors in which one of the two functions receives, in case nothing arrives."""
    if tensors and tensors[0].dtype in _DTYPES and _is_receiver(caller(_ASKING)):
        for tensor in tensors:
            tensor.zero_()


def gather_own() -> bool | None:
    """Makes a function that gathers objects unpickle this rank's own in every place, where echo has put its bytes.

    Returns:
        whether this rank gets the objects; None: no such function calls.
    """
    frame = caller(_GATHERING)
    if frame is None:
        return None
    local = frame.f_locals
    local[_SIZES].copy_(local[_OWN_SIZE])
    return frame.f_code not in _GATHERING_FOR_ONE or local[_RANK] == local[_DESTINATION]


def refuse_unpickling(group: str, why: str) -> None:
    """Stops a receiving function before it unpickles bytes that no rank has sent. The sending rank may continue.

    Raises:
        PeerLost: on a receiving rank, with the function, the group and the reason.
    """
    frame = caller(_RECEIVING)
    if frame is not None and _is_receiver(frame):
        raise PeerLost(f"{frame.f_code.co_name} on group {group}: {why}")


def more_follow() -> bool:
    """Whether `batch_isend_irecv` is calling, and more operations of its list follow."""
    frame = caller(_BATCHING)
    if frame is None:
        return False
    operations = frame.f_locals[_OPERATIONS]
    return bool(operations) and frame.f_locals.get(_OPERATION) is not operations[-1]


def _is_receiver(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_locals.get(_RANK) != frame.f_locals.get(_SOURCE)  # one only receives


def caller(functions: frozenset[CodeType]) -> FrameType | None:
    """Returns the frame of one of torch's ``functions``, from the caller of the calling function outwards; or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_PASSED_THROUGH):
        if frame.f_code in functions:
            return frame
        frame = frame.f_back
    return None
