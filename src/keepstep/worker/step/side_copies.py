"""Copies of a rank's state into host memory for snapshots, concurrent with the device's computation.

On a GPU the device's copy engine copies on a separate stream, while forward and backward compute. The target is memory
that the agent holds as well. The driver pins it (``cudaHostRegister``), as torch's own checkpoints pin shared memory
(`torch.distributed._state_dict_utils`, with ``share_memory`` and ``pin_memory``). If the driver refuses, the same
copies go through the driver's staging memory. That is slower, and blocks the calling thread (CUDA runtime, "API
synchronization behavior"). keepstep has no staging memory of its own on either way, and only the speed differs. Not
measured on a GPU.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from keepstep.weights.memory.bytes_of import address_of, copy_flat
from keepstep.weights.memory.gpu_copies import on_device_of

Wait = Callable[[], None]
"""Blocks until a copy, or the work before a mark, is complete.

Raises:
    RuntimeError: an error of the device, after which the process cannot continue."""
_HOST_CHUNK_BYTES = 1 << 20
"""Size of a chunk on the host. It is still in the cache when it is hashed."""
_STREAM_CHUNK_BYTES = 32 << 20
"""Size of a chunk on a GPU: at 25 GB/s more than a millisecond, while a launch takes some microseconds."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


def _nothing() -> None:
    """A `Wait` for a copy that is complete already."""


class SideCopies(Protocol):
    """Copies the tensors of a snapshot into host memory.

    Attributes:
        chunk_bytes: size of a chunk.
        num_ahead: maximum number of chunks in flight.
    """

    chunk_bytes: int
    num_ahead: int

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """Prepares the memory of a slot as target of copies. May keep it mapped until the slot gets other memory."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies in stream order with the work that this thread launches on the device.

        Args:
            target: uint8 [n], in host memory. It holds the bytes when a later `mark` is complete.
            source: uint8 [n].
        """
        ...

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """Returns a wait for all work that this thread has launched on some devices."""
        ...

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Begins a copy beside all launched work. Nothing may write to ``source`` before the returned wait is over.

        Args:
            target: uint8 [n], in host memory.
            source: uint8 [n].
        """
        ...


class HostCopies:
    """For tensors in host memory: the calling thread copies. Implements `SideCopies`."""

    chunk_bytes, num_ahead = _HOST_CHUNK_BYTES, 1

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """Does nothing."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `SideCopies`."""
        copy_flat(target, source)

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """See `SideCopies`. Copies on the host are complete already."""
        return _nothing

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """See `SideCopies`."""
        copy_flat(target, source)
        return _nothing


class PinnedSlots:
    """Pins the memory of slots in the driver."""

    def __init__(self, register: Callable[[int, int], str | None], unregister: Callable[[int], str | None]) -> None:
        """Args:
        register: pins a number of bytes from an address on; returns the driver's error, or None.
        unregister: unpins the memory at an address; returns likewise.
        """
        self._register, self._unregister = register, unregister
        self._held: dict[int, tuple[mmap.mmap, int]] = {}
        """slot -> its memory, which stays mapped until the driver has unpinned it, and the address."""
        self._is_refused = False

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """See `SideCopies`. If the driver refuses, prints that once, and does not try again."""
        held = self._held.get(slot)
        if self._is_refused or (held is not None and held[0] is memory):
            return
        if held is not None:
            self._tell(self._unregister(held[1]))
            del self._held[slot]
        with memoryview(memory) as view:
            address = address_of(view)
        problem = self._register(address, len(memory))
        if problem is None:
            self._held[slot] = (memory, address)
        self._tell(problem)

    def _tell(self, problem: str | None) -> None:
        if problem is not None:
            self._is_refused = True
            print(
                f"keepstep: snapshots are copied through the driver's staging memory, which is slower; it does "
                f"not pin them: {problem}",
                file=sys.stderr,
                flush=True,
            )


class StreamCopies:
    """For tensors of which some are on a GPU. Implements `SideCopies`.

    The stream needs no order with others: the snapshot thread waits for `mark` before it begins a copy, and the
    training thread waits for the snapshot thread before it launches an update.
    """

    chunk_bytes, num_ahead = _STREAM_CHUNK_BYTES, 2

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: the process's own device.
        """
        self._device = device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """Streams of the snapshot thread."""
        self._slots = PinnedSlots(self._register, self._unregister)

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """See `SideCopies`. Pinning takes time, and makes all of the memory resident."""
        self._slots.pin(slot, memory)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `SideCopies`."""
        copy_flat(target, source)

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """See `SideCopies`."""
        events = []
        for device in devices:
            if device.type == "cuda":
                events.append(torch.cuda.Event(blocking=True))  # a waiting thread leaves its core to others
                events[-1].record(torch.cuda.current_stream(device))

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """See `SideCopies`."""
        if source.device.type == "cpu":
            copy_flat(target, source)
            return _nothing
        if source.device not in self._streams:
            self._streams[source.device] = torch.cuda.Stream(source.device)
        with on_device_of(self._streams[source.device]):
            copy_flat(target, source)
        return self._mark_of(self._streams[source.device])

    def _mark_of(self, stream: torch.cuda.Stream) -> Wait:
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event.synchronize

    def _register(self, address: int, num_bytes: int) -> str | None:
        return self._ask_driver(lambda driver: driver.cudaHostRegister(address, num_bytes, _PORTABLE))

    def _unregister(self, address: int) -> str | None:
        return self._ask_driver(lambda driver: driver.cudaHostUnregister(address))

    def _ask_driver(self, call: Callable[[Any], Any]) -> str | None:
        """Calls the driver in a separate thread. CUDA keeps the last error of each thread, and torch would take it for
        an error of its next kernel (``cudaGetLastError`` after a launch)."""

        def ask() -> str | None:
            with torch.cuda.device(self._device):  # so that no other device is opened
                driver = torch.cuda.cudart()
                error = call(driver)
                return None if int(error) == 0 else str(driver.cudaGetErrorString(error))

        with ThreadPoolExecutor(1, "keepstep-pin") as thread:
            return thread.submit(ask).result()


def side_copies(device: torch.device) -> SideCopies:
    """Returns the copies for the state of a process with this device."""
    return HostCopies() if device.type == "cpu" else StreamCopies(device)
