"""The choice of a parked spare's device: until it has a rank, it runs no line of its script and uses no device."""

from __future__ import annotations

from collections.abc import Collection


def device_for(own: int, taken: Collection[int], closed: Collection[int], num_devices: int) -> int:
    """Chooses the device that a parked spare takes with its rank.

    Args:
        own: the device number with which it was started, which may be beyond the node's devices.
        taken: the devices of the node's ranks.
        closed: the unhealthy devices.
        num_devices: number of the node's devices.

    Returns:
        ``own`` if it is free, else the first free device. If none is free, ``own``: the spare shares that device.
    """
    free = [device for device in range(num_devices) if device not in taken and device not in closed]
    return own if own in free or not free else free[0]
