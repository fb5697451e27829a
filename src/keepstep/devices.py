"""The order in which each process of a node sees the node's devices."""

from __future__ import annotations

from collections.abc import Sequence


def order_for(devices: Sequence[str], device: int, local_rank: int) -> tuple[str, ...]:
    """The devices of a node, turned so that a process finds its own one at ``LOCAL_RANK``.

    Scripts call ``torch.cuda.set_device(LOCAL_RANK)``. A replacement has the local rank of the rank that was lost, and
    mostly another device. Turning keeps neighbours together, and a process on the device of its number sees the devices
    as they are.

    Args:
        devices: of the node, as ``CUDA_VISIBLE_DEVICES`` names them.
        device: the process's own place, counted from 0; beyond the devices, processes share them.
        local_rank: of the process; beyond the devices, scripts take it modulo their number.
    """
    num = len(devices)
    return tuple(devices[(at + device - local_rank) % num] for at in range(num))


def names_of(visible: str | None, num_devices: int) -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` calls the devices of this machine.

    Args:
        visible: the variable as it is; None where it is not set.
        num_devices: how many torch sees.
    """
    if visible is None:
        return tuple(map(str, range(num_devices)))
    return tuple(name.strip() for name in visible.split(","))[:num_devices]
