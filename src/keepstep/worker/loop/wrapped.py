"""What frameworks wrap around torch's own objects: Accelerate, and Lightning Fabric."""

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
"""By the name of the wrapper's class the attribute under which it has what it wraps."""


def unwrapped(thing: Any) -> Any:
    """The object of torch, or of the user, in it: that one has the hooks, and the tensors to restore."""
    for name, attribute in _INSIDE.items():
        if is_named(thing, name):
            return unwrapped(getattr(thing, attribute))
    return thing


def prepared(loader: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The loader of torch in one that Accelerate or Lightning Fabric has prepared, and what places a batch of it."""
    if is_named(loader, "DataLoaderShard"):
        from accelerate.utils import send_to_device

        return loader.base_dataloader, lambda batch: send_to_device(batch, loader.device)
    if is_named(loader, "_FabricDataLoader"):
        from lightning.fabric.utilities.apply_func import move_data_to_device

        return loader._dataloader, lambda batch: move_data_to_device(batch, loader.device or "cpu")
    return loader, lambda batch: batch
