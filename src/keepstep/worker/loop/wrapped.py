"""Unwraps torch's objects from the wrappers of Accelerate and Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.typenames import is_named

_INSIDE = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "_FabricModule": "_forward_module",
    "_FabricOptimizer": "optimizer",
}
"""Name of a wrapper class -> the attribute that holds the wrapped object."""


def unwrapped(thing: Any) -> Any:
    """The torch or user object inside a wrapper: it has the hooks, and the tensors to restore."""
    for name, attribute in _INSIDE.items():
        if is_named(thing, name):
            return unwrapped(getattr(thing, attribute))
    return thing


def prepared(loader: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Splits a loader that Accelerate or Lightning Fabric has prepared.

    Returns:
        the torch loader, and a function that moves a batch to the device.
    """
    if is_named(loader, "DataLoaderShard"):
        from accelerate.utils import send_to_device

        return loader.base_dataloader, lambda batch: send_to_device(batch, loader.device)
    if is_named(loader, "_FabricDataLoader"):
        from lightning.fabric.utilities.apply_func import move_data_to_device

        return loader._dataloader, lambda batch: move_data_to_device(batch, loader.device or "cpu")
    return loader, lambda batch: batch
