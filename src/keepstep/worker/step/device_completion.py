"""Waits until the work that a process has launched on its GPU is complete.

A host runs ahead of its GPU: after ``backward()`` the gradients are launched and not yet computed. The gradient
barrier vouches for complete gradients, so the host waits for the device before it counts as synced, and launches the
update's kernels only when it has seen the barrier pass: a collective that is aborted completes, with garbage, and
whatever is queued after it on the stream runs. What the lost run-ahead costs was not measured on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Protocol

import torch

POLL_S = 0.0002
"""Between two looks at the device: a fraction of the shortest steps on GPUs, and a look costs microseconds."""


class DeviceCompletion(Protocol):
    """What the training thread asks of its process's own device."""

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """Returns when all that was launched on the current stream is complete, or the step is interrupted.

        Args:
            look: called between looks at the device; notices which operations of groups have ended.
            is_interrupted: whether the step is to be undone anyway.

        Raises:
            RuntimeError: an error of the device, after which the process cannot go on.
        """
        ...

    def drain(self) -> None:
        """Returns when nothing runs on any stream of the process's devices. No group has an operation under way.

        Raises:
            RuntimeError: as for `wait`.
        """
        ...


class HostCompletion:
    """A process without a GPU: what it has called is complete. Implements `DeviceCompletion`."""

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """Returns at once, and calls neither function."""

    def drain(self) -> None:
        """Returns at once."""


class StreamCompletion:
    """A process with a GPU. Implements `DeviceCompletion`."""

    def __init__(self, record: Callable[[], Callable[[], bool]], synchronize: Callable[[], None]) -> None:
        """Args:
        record: marks a place on the current stream of each device; returns whether all have come there.
        synchronize: waits for all streams of all devices.
        """
        self._record = record
        self._synchronize = synchronize
        self._never = threading.Event()

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """See `DeviceCompletion.wait`. ``look`` is called after the end, too: what has ended may have failed."""
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
    """What waits for the process's own device.

    Args:
        device: that one.
        others: on which the process trains as well; where a model is spread over several GPUs.
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
            if is_used or torch.cuda.memory_reserved(index):  # another one that the script has opened
                torch.cuda.synchronize(index)

    return StreamCompletion(record, synchronize)
