"""Handles for torch's C++ code, where a Python object is not sufficient.

A `dist.Work` created in Python loses its methods when Python drops it, although C++ still holds it: waiting for it
would never end.
"""

from __future__ import annotations

import inspect

from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from keepstep.worker.groups import objects

_KEPT_BY_REDUCER = frozenset({inspect.unwrap(Join.notify_join_context).__code__})
"""DDP passes the handle that this function gets from `all_reduce` to its reducer in C++, and keeps no reference."""


def for_reducer(work: dist.Work) -> dist.Work:
    """Returns ``work``, or a handle that C++ can keep alive if DDP's reducer gets the result of `all_reduce`."""
    if objects.caller(_KEPT_BY_REDUCER) is None:
        return work
    handle: dist.Work = c10d._create_work_from_future(work.get_future())
    return handle
