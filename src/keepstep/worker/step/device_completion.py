"""When what a process has launched on its GPU is complete there.

A host runs ahead of its GPU: behind ``backward()`` the gradients are launched and not yet computed. The gradient
barrier vouches for complete gradients, so the host waits for the device before it counts as synced, and launches the
update's kernels only when it has seen the barrier pass: a collective that is aborted completes, with garbage, and
whatever is queued behind it on the stream runs. What the lost run-ahead costs was not measured on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        """Returns when nothing runs on any stream of the device. No group has an operation under way.

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
        record: marks a place on the current stream; returns whether the device has come there.
        synchronize: waits for all streams of the device.
        """
        self._record = record
        self._synchronize = synchronize
        self._never = threading.Event()

    def wait(self, look: Callable[[], None], is_interrupted: Callable[[], bool]) -> None:
        """See `DeviceCompletion.wait`. ``look`` is called behind the end, too: what has ended may have failed."""
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


def completion_on(device: torch.device) -> DeviceCompletion:
    """What waits for the process's own device."""
    if device.type != "cuda":
        return HostCompletion()

    def record() -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return lambda: bool(event.query())

    return StreamCompletion(record, lambda: torch.cuda.synchronize(device))
