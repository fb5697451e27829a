"""The choice of a parked spare's device: until it has a rank, it runs no line of its script and uses no device."""

from __future__ import annotations

from collections.abc import Collection


def device_for(own: int, taken: Collection[int], closed: Collection[int], num_devices: int) -> int:
    """The device that a parked spare takes with its rank.

    Args:
        own: the number under which it was started, which may be beyond the devices.
        taken: the devices of the node's ranks.
        closed: the sick ones.
        num_devices: how many the node has.

    Returns:
        its own if that is free, else the first that is; its own, which it shares then, where none is.
    """
    free = [device for device in range(num_devices) if device not in taken and device not in closed]
    return own if own in free or not free else free[0]
