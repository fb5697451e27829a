"""Copies of a rank's state into host memory for snapshots, concurrent with the device's computation.

On a GPU the copies run on a stream of their own, by the device's copy engine, while forward and backward compute. They
go straight into the memory that the agent holds as well: the driver pins it (``cudaHostRegister``), as torch's own
checkpoints pin shared memory (`torch.distributed._state_dict_utils`, with ``share_memory`` and ``pin_memory``). Where
the driver refuses, the same copies go through the driver's staging memory, whose size is the driver's: slower, and the
thread that calls them stands still meanwhile (CUDA runtime, "API synchronization behavior"). So there is no staging
memory of keepstep's on either way, and nothing but the speed depends on which it is. Not measured on a GPU.
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
"""Returns when what it stands for is complete.

Raises:
    RuntimeError: an error of the device, after which the process cannot go on.
"""
_HOST_CHUNK_BYTES = 1 << 20
"""What is copied on the host before its checksum is taken: it is in the cache then."""
_STREAM_CHUNK_BYTES = 32 << 20
"""What a GPU copies at a time: at 25 GB/s more than a millisecond, and a launch takes some microseconds."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


def _nothing() -> None:
    """The `Wait` of what is complete already."""


class SideCopies(Protocol):
    """How the tensors of a snapshot come into host memory.

    Attributes:
        chunk_bytes: how much is copied at a time.
        num_ahead: how many chunks are begun before the first is waited for.
    """

    chunk_bytes: int
    num_ahead: int

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """Prepares memory to be copied into; it is this object's own as long as it is that of the slot."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies in order with what this thread has launched on the device, and launches next.

        Args:
            target: uint8 [n], in host memory. It holds the bytes when a later `mark` has come.
            source: uint8 [n].
        """
        ...

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """The place to which this thread's launches on some devices have come."""
        ...

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Begins to copy beside all that was launched. ``source`` must not be written to before the wait is over.

        Args:
            target: uint8 [n], in host memory.
            source: uint8 [n].
        """
        ...


class HostCopies:
    """All tensors are in host memory: the calling thread copies. Implements `SideCopies`."""

    chunk_bytes, num_ahead = _HOST_CHUNK_BYTES, 1

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """Nothing to do."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `SideCopies`."""
        copy_flat(target, source)

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """See `SideCopies`. What a processor was told to do is done."""
        return _nothing

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """See `SideCopies`."""
        copy_flat(target, source)
        return _nothing


class PinnedSlots:
    """The memory of slots, known to the driver as pinned."""

    def __init__(self, register: Callable[[int, int], str | None], unregister: Callable[[int], str | None]) -> None:
        """Args:
        register: pins so many bytes from an address on; what the driver has against it, if anything.
        unregister: the opposite.
        """
        self._register, self._unregister = register, unregister
        self._held: dict[int, tuple[mmap.mmap, int]] = {}
        """slot -> its memory, which is not unmapped before the driver lets it go, and the address."""
        self._is_refused = False

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """See `SideCopies`. Where the driver refuses, that is told once, and not tried again."""
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
    """Some tensors are on a GPU. Implements `SideCopies`.

    The stream needs no order with others: the thread of the snapshots waits for `mark` before it begins a copy, and
    the training thread waits for that thread before it launches an update.
    """

    chunk_bytes, num_ahead = _STREAM_CHUNK_BYTES, 2

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: the process's own.
        """
        self._device = device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """Of the thread of the snapshots."""
        self._slots = PinnedSlots(self._register, self._unregister)

    def pin(self, slot: int, memory: mmap.mmap) -> None:
        """See `SideCopies`. To pin takes its time, and all of the memory."""
        self._slots.pin(slot, memory)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `SideCopies`."""
        copy_flat(target, source)

    def mark(self, devices: Collection[torch.device]) -> Wait:
        """See `SideCopies`."""
        events = []
        for device in devices:
            if device.type == "cuda":
                events.append(torch.cuda.Event(blocking=True))  # a wait for it leaves the core to others
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
        """In a thread of its own: CUDA keeps the last error of each thread, and torch would take it for its next
        kernel's (``cudaGetLastError`` after a launch)."""

        def ask() -> str | None:
            with torch.cuda.device(self._device):  # no other device is opened
                driver = torch.cuda.cudart()
                error = call(driver)
                return None if int(error) == 0 else str(driver.cudaGetErrorString(error))

        with ThreadPoolExecutor(1, "keepstep-pin") as thread:
            return thread.submit(ask).result()


def side_copies(device: torch.device) -> SideCopies:
    """What copies the state of a process with this device."""
    return HostCopies() if device.type == "cpu" else StreamCopies(device)
