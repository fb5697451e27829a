"""Chooses the adapters of a model: the only place that detects the form of parallelism of the user's objects."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.worker.parallel.composed import Composed
from keepstep.worker.parallel.ddp import DataParallel, find_ddp
from keepstep.worker.parallel.fsdp2 import FullySharded, find_fully_sharded
from keepstep.worker.parallel.layout import ParallelLayout, Replicated
from keepstep.worker.parallel.pipeline import Pipelined, is_schedule, refuse_unprotected
from keepstep.worker.parallel.tensor import TensorParallel, has_dtensors
from keepstep.worker.parallel.zero import ZeroRedundancy, is_zero


def layout_of(objects: dict[str, Any]) -> ParallelLayout:
    """Returns one adapter for all forms of parallelism in the protected objects.

    Args:
        objects: the protected objects, by the user's names.

    Raises:
        ConfigurationError: an object cannot be protected.
    """
    modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
    found: list[ParallelLayout] = []
    if replicated := find_ddp(modules):
        found.append(DataParallel(replicated))
    if sharded := find_fully_sharded(modules):
        found.append(FullySharded(sharded))
    if has_dtensors(modules):
        found.append(TensorParallel(modules))
    schedules = {name: thing for name, thing in objects.items() if is_schedule(thing)}
    refuse_unprotected(modules, schedules)
    if schedules:
        found.append(Pipelined(schedules))
    if partitioned := {name: thing for name, thing in objects.items() if is_zero(thing)}:
        found.append(ZeroRedundancy(partitioned))
    match found:
        case []:
            return Replicated()
        case [only]:
            return only
        case _:
            return Composed(found)
