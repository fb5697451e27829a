"""Waits until the work that a process has launched on its GPU is complete.

A host runs ahead of its GPU: after ``backward()`` the gradients are launched and not yet computed. The gradient barrier
guarantees complete gradients, so the host waits for the device before the rank counts as synced. The host launches the
update's kernels only after the barrier: an aborted collective completes with garbage, and the kernels queued after it
on the stream run. The cost of this wait was not measured on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Protocol

import torch

POLL_S = 0.0002
"""Interval of polling the device, in seconds: a fraction of the shortest steps on GPUs. One poll costs microseconds."""


class DeviceCompletion(Protocol):
    """Waits for work on the devices of a process. Used by the training thread."""

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """Waits until all work launched on the current stream is complete, or the step is interrupted.

        Args:
            look: called between polls of the device; finds operations of groups that have ended.
            is_interrupted: whether the step will be undone anyway.

        Raises:
            RuntimeError: an error of the device, after which the process cannot continue.
        """
        ...

    def drain(self) -> None:
        """Waits until no stream of the process's devices has work. No group may have an operation in flight.

        Raises:
            RuntimeError: as for `wait`.
        """
        ...


class HostCompletion:
    """For a process without a GPU, whose calls are synchronous. Implements `DeviceCompletion`."""

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """Returns at once, and calls neither function."""

    def drain(self) -> None:
        """Returns at once."""


class StreamCompletion:
    """For a process with a GPU. Implements `DeviceCompletion`."""

    def __init__(self, record: Callable[[], Callable[[], bool]], synchronize: Callable[[], None]) -> None:
        """Args:
        record: records an event on the current stream of each device; returns a function: whether all are complete.
        synchronize: waits for all streams of all devices.
        """
        self._record = record
        self._synchronize = synchronize
        self._never = threading.Event()

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """See `DeviceCompletion.wait`. Calls ``look`` at the end, too: an operation that has ended may have failed."""
        has_come = self._record()
        while not has_come():
            look()
            if is_interrupted():
                return
            self._never.wait(POLL_S)
        look()

    def drain(self) -> None:
        """See `DeviceCompletion.drain`."""
        self._synchronize()


def completion_on(device: torch.device, others: Collection[torch.device] = ()) -> DeviceCompletion:
    """Returns the `DeviceCompletion` of a process.

    Args:
        device: the process's own device.
        others: further devices on which the process trains, if a model is spread over several GPUs.
    """
    if device.type != "cuda":
        return HostCompletion()
    used = {device, *(other for other in others if other.type == "cuda")}

    def record() -> Callable[[], bool]:
        events = []
        for each in used:
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(each))
        return lambda: all(event.query() for event in events)

    def synchronize() -> None:
        for index in range(torch.cuda.device_count()):
            is_used = torch.device("cuda", index) in used
            if is_used or torch.cuda.memory_reserved(index):  # another GPU that the script uses
                torch.cuda.synchronize(index)

    return StreamCompletion(record, synchronize)
