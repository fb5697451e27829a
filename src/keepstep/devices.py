"""The order in which each process of a node sees the node's devices."""

from __future__ import annotations

from collections.abc import Sequence


def order_for(devices: Sequence[str], device: int, local_rank: int) -> tuple[str, ...]:
    """Returns the devices of a node, rotated so that a process finds its own device at index ``LOCAL_RANK``.

    Scripts call ``torch.cuda.set_device(LOCAL_RANK)``. A replacement has the local rank of the lost rank, but usually
    another device. The rotation keeps neighbouring devices together. It changes nothing if ``device`` equals
    ``local_rank``.

    Args:
        devices: the node's devices, as ``CUDA_VISIBLE_DEVICES`` names them.
        device: index of the process's own device, from 0; taken modulo the number of devices, as processes share them.
        local_rank: local rank of the process; taken modulo the number of devices, as scripts do.
    """
    num = len(devices)
    return tuple(devices[(at + device - local_rank) % num] for at in range(num))


def names_of(visible: str | None, num_devices: int) -> tuple[str, ...]:
    """Returns the names of this machine's devices, as ``CUDA_VISIBLE_DEVICES`` writes them.

    Args:
        visible: the value of the variable; None if it is not set.
        num_devices: number of devices that torch sees.
    """
    if visible is None:
        return tuple(map(str, range(num_devices)))
    return tuple(name.strip() for name in visible.split(","))[:num_devices]
