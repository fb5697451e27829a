"""Futures of collectives, of the type that torch's C++ code requires.

A future created in Python holds a Python object, but a few places in C++ need a list of tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def needs_type(outputs: object) -> bool:
    """Whether C++ may need the future of a collective as a list of tensors: DDP's built-in hook for float16 does."""
    return isinstance(outputs, list) and bool(outputs) and getattr(outputs[0], "dtype", None) is torch.float16


def typed(future: torch.futures.Future[Any], outputs: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    """Returns a future of type List[Tensor] of ``outputs``. It completes, or fails, when ``future`` does."""
    return _after()(future, outputs)


@functools.cache
def _after() -> Callable[[torch.futures.Future[Any], list[Tensor]], torch.futures.Future[list[Tensor]]]:
    """Compiles the function that makes such futures, within milliseconds: only TorchScript can make them."""
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
