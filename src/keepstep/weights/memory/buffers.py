"""A buffer of fixed slots in shared memory, written by one process and read by others.

It is a memory file (`memfd_create`). It has no name that another process could open, ``/dev/shm`` does not limit its
size, and it disappears with the last process that has it open. Its memory is allocated at creation. So a lack of memory
raises an error then, and does not kill the process at the first access. Other processes can only read it: the kernel
refuses to map it for writing (F_SEAL_FUTURE_WRITE), so a consumer cannot corrupt data that others are reading.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from keepstep.errors import BufferUnavailable, ConfigurationError, RemoteProtocolError
from keepstep.freememory import free_bytes
from keepstep.protocol.transfer.messages import BufferPlace
from keepstep.systemcalls import memory_file
from keepstep.weights.memory.bytes_of import copy_bytes
from keepstep.weights.memory.gpu_buffers import GpuBuffer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x0010) | fcntl.F_SEAL_SEAL
MAX_SLOTS = 64
"""More than any transfer uses. A larger claim of a peer is refused before memory is mapped for it."""


class Buffer(Protocol):
    """A buffer that one stage writes and the next one reads: slots of the same size, in host or GPU memory."""

    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all slots together."""
        ...

    def view(self, slot: int) -> torch.Tensor:
        """A slot as a tensor, uint8 [slot_bytes]. Valid until `close`."""
        ...

    def fill(self, slot: int, source: torch.Tensor, num_bytes: int) -> None:
        """Copies the first ``num_bytes`` of ``source`` into a slot. The copy is complete when it returns."""
        ...

    def share(self) -> tuple[BufferPlace, list[int]]:
        """Returns the description and the file descriptors that one other process needs to map the buffer."""
        ...

    def close(self) -> None:
        """Gives the memory back. No view may be used any more. Any number of times."""
        ...


class SlotBuffer:
    """A buffer in host memory. Made by `create` in its writer and by `attach` in its readers."""

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int, writable: bool) -> None:
        """Takes over ``descriptor``."""
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, num_slots * slot_bytes, flags, protection)
        self._address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        self._views: dict[int, torch.Tensor] = {}

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> SlotBuffer:
        """Creates a buffer and allocates all of its memory.

        Raises:
            BufferUnavailable: there is not enough memory, or a resource limit of this process is too low.
        """
        size = num_slots * slot_bytes
        if size > free_bytes():
            raise BufferUnavailable(_unavailable(size, num_slots, "not enough memory is available"))
        descriptor = memory_file("slots", flags=os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with _without_signal(signal.SIGXFSZ):
                os.posix_fallocate(descriptor, 0, size)
            buffer = cls(os.dup(descriptor), num_slots, slot_bytes, writable=True)
        except OSError as error:
            reason = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"
            raise BufferUnavailable(_unavailable(size, num_slots, reason)) from None
        finally:
            os.close(descriptor)
        fcntl.fcntl(buffer.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return buffer

    @classmethod
    def attach(cls, descriptor: int, num_slots: int, slot_bytes: int) -> SlotBuffer:
        """Maps another process's buffer for reading. Takes ownership of ``descriptor``.

        Raises:
            RemoteProtocolError: the file does not have the described size, or cannot be mapped.
        """
        size = os.fstat(descriptor).st_size
        if not (0 < num_slots <= MAX_SLOTS and slot_bytes > 0 and num_slots * slot_bytes == size):
            os.close(descriptor)
            raise RemoteProtocolError(f"a buffer of {size} bytes for {num_slots} slots of {slot_bytes} bytes")
        try:
            return cls(descriptor, num_slots, slot_bytes, writable=False)
        except OSError as error:
            raise RemoteProtocolError(f"a buffer that cannot be mapped ({error.strerror})") from None

    @property
    def num_bytes(self) -> int:
        """Of all slots together."""
        return self.num_slots * self.slot_bytes

    def address(self, slot: int) -> int:
        """The address of a slot in this process. Raises ValueError if the buffer is closed."""
        if self._map.closed:
            raise ValueError("the buffer is closed")
        return self._address + slot * self.slot_bytes

    def view(self, slot: int) -> torch.Tensor:
        """A slot as a tensor, uint8 [slot_bytes]. It keeps the memory, also after `close`. In a reader a write to it
        ends the process.

        Raises:
            ValueError: the buffer is closed.
        """
        if slot not in self._views:
            memory = (ctypes.c_uint8 * self.slot_bytes).from_address(self.address(slot))
            memory.mapping = memoryview(self._map)  # type: ignore[attr-defined]  # while it exists nothing is unmapped
            self._views[slot] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._views[slot]

    def fill(self, slot: int, source: torch.Tensor, num_bytes: int) -> None:
        """See `Buffer`."""
        copy_bytes(self.address(slot), source.data_ptr(), num_bytes)

    def share(self) -> tuple[BufferPlace, list[int]]:
        """See `Buffer`."""
        return BufferPlace(self.num_slots, self.slot_bytes, None), [self.descriptor]

    def close(self) -> None:
        """Gives the memory back, when the last view of it is gone. Any number of times."""
        self._close()
        self.descriptor = -1
        self._views.clear()
        try:
            self._map.close()
        except BufferError:  # a view or a part is in use; it goes with the last of them
            self._map = _closed_map()


def _closed_map() -> mmap.mmap:
    closed = mmap.mmap(-1, 1)
    closed.close()
    return closed


@dataclasses.dataclass(frozen=True, slots=True)
class SlotPart:
    """The first bytes of a slot. It keeps the memory, also after the buffer was closed.

    Attributes:
        buffer: the buffer.
        slot: number of the slot.
        num_bytes: number of bytes.
    """

    buffer: SlotBuffer
    slot: int
    num_bytes: int
    _memory: torch.Tensor = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_memory", self.buffer.view(self.slot))

    @property
    def address(self) -> int:
        """The address of the first byte in this process."""
        return self._memory.data_ptr()

    @property
    def content(self) -> memoryview:
        """A view of the bytes; writing to it writes the slot."""
        return self._memory.numpy().data[: self.num_bytes]


Fill = Callable[[SlotPart | None], None]
"""Writes a bucket into a slot. Called with None if no consumer wants the bucket any more."""


class SharedSlots:
    """Slots of other processes' buffers, under the numbers that those processes assigned. Used by one thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffer] = {}
        self._places: dict[int, tuple[Buffer, int]] = {}

    def add(self, first_slot: int, buffer: Buffer) -> None:
        """Adds a buffer and takes ownership of it. Closes a former buffer with the same numbers."""
        if (former := self._buffers.get(first_slot)) is not None:
            self._places = {slot: place for slot, place in self._places.items() if place[0] is not former}
            former.close()
        self._buffers[first_slot] = buffer
        self._places |= {first_slot + slot: (buffer, slot) for slot in range(buffer.num_slots)}

    def find(self, slot: int, num_bytes: int) -> torch.Tensor | None:
        """A slot, uint8, valid until its buffer is closed. None if the number is unknown or the slot is too small."""
        if (place := self._places.get(slot)) is None or place[0].slot_bytes < num_bytes:
            return None
        buffer, number = place
        return buffer.view(number)

    def close(self) -> None:
        """Closes all buffers."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers, self._places = {}, {}


def make_buffer(device: torch.device, num_slots: int, slot_bytes: int) -> Buffer:
    """A new buffer in a device's memory.

    Raises:
        BufferUnavailable: there is not enough memory.
        ConfigurationError: this machine has no such device.
    """
    if device.type == "cpu":
        return SlotBuffer.create(num_slots, slot_bytes)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigurationError(
            f"device '{device}' for buffers: this process has no such device; 'cpu' and GPUs of CUDA do"
        )
    return GpuBuffer.create(device, num_slots, slot_bytes)


def _unavailable(size: int, num_slots: int, reason: str) -> str:
    return (
        f"{size / 2**20:.1f} MiB of shared memory for {num_slots} buckets is not available ({reason}): "
        "use a smaller bucket_bytes"
    )


@contextmanager
def _without_signal(number: int) -> Iterator[None]:
    """Blocks the signal that would end the process beyond RLIMIT_FSIZE, so that the call raises an error instead."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        if number not in blocked:
            signal.sigtimedwait({number}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
