"""Handles and futures for torch's C++, where an object of Python's does not do.

A `dist.Work` of Python's loses its methods when Python drops it, though C++ still holds it: waiting for it then never
ends. And a future that Python makes holds a Python object, where a few places in C++ want a list of tensors.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from keepstep.worker.groups import objects

_KEPT_BY_REDUCER = frozenset({inspect.unwrap(Join.notify_join_context).__code__})
"""DDP hands to its reducer, which is C++, what this gets from `all_reduce`, and forgets it."""


def for_reducer(work: dist.Work) -> dist.Work:
    """``work``, or where `all_reduce` was called for DDP's reducer a handle that C++ may keep by itself."""
    if objects.caller(_KEPT_BY_REDUCER) is None:
        return work
    handle: dist.Work = c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]  # not in the stub
    return handle


def needs_type(outputs: object) -> bool:
    """Whether the future of a collective may be asked for a list of tensors in C++: DDP's built-in hook for float16."""
    return isinstance(outputs, list) and bool(outputs) and getattr(outputs[0], "dtype", None) is torch.float16


def typed(future: torch.futures.Future[Any], outputs: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    """A future of type List[Tensor], of ``outputs``, that is done when ``future`` is and fails when it does."""
    return _after()(future, outputs)


@functools.cache
def _after() -> Callable[[torch.futures.Future[Any], list[Tensor]], torch.futures.Future[list[Tensor]]]:
    """TorchScript alone makes such futures; it is compiled when one is needed, within milliseconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile has no futures
        script: Callable[[torch.futures.Future[Any], list[Tensor]], torch.futures.Future[list[Tensor]]]
        script = torch.jit.script(_begin)
    return script


def _begin(
    future: torch.futures.Future[list[torch.Tensor]], outputs: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    begun: torch.futures.Future[list[torch.Tensor]] = torch.jit._fork(_end, future, outputs)
    return begun


def _end(future: torch.futures.Future[list[torch.Tensor]], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    future.wait()
    return outputs
