"""A buffer of slots on a GPU, written by one process and read by others through CUDA's interprocess memory handles."""

from __future__ import annotations

import torch

from keepstep.errors import BufferUnavailable, RemoteProtocolError
from keepstep.protocol.transfer.messages import BufferPlace, GpuMemory
from keepstep.weights.memory.gpu_copies import on_stream

_ALIGNMENT_BYTES = 256
"""Alignment of each slot in bytes, as torch and CUDA align their allocations."""


class MemoryNotMapped(RuntimeError):
    """CUDA does not map another process's memory into this one."""


class GpuBuffer:
    """A buffer on a GPU, see `keepstep.weights.memory.buffers.Buffer`.

    Made by `create` in its writer and by `attach` in its readers.
    """

    def __init__(self, memory: torch.Tensor, num_slots: int, slot_bytes: int) -> None:
        """Args:
        memory: uint8, at least ``num_slots * slot_bytes`` bytes.
        num_slots: number of slots.
        slot_bytes: size of each slot.
        """
        self._memory: torch.Tensor | None = memory
        self.num_slots, self.slot_bytes = num_slots, slot_bytes

    @classmethod
    def create(cls, device: torch.device, num_slots: int, slot_bytes: int) -> GpuBuffer:
        """Allocates a buffer. Its slots may be larger than ``slot_bytes``, for alignment.

        Raises:
            BufferUnavailable: the GPU has not enough memory left.
        """
        slot_bytes = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        try:
            memory = torch.zeros(num_slots * slot_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise BufferUnavailable(
                f"{num_slots * slot_bytes / 2**20:.1f} MiB on {device} for {num_slots} buckets is unavailable: {error}"
            ) from None
        torch.cuda.synchronize(device)
        return cls(memory, num_slots, slot_bytes)

    @classmethod
    def attach(cls, place: BufferPlace) -> GpuBuffer:
        """Maps another process's buffer for reading.

        Raises:
            RemoteProtocolError: this process does not see that GPU, or the memory is smaller than described.
            MemoryNotMapped: CUDA cannot map the memory.
        """
        assert place.gpu is not None
        memory = map_memory(place.gpu)
        if place.num_slots * place.slot_bytes > memory.numel():
            raise RemoteProtocolError(
                f"a buffer of {memory.numel()} bytes for {place.num_slots} slots of {place.slot_bytes} bytes"
            )
        return cls(memory, place.num_slots, place.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all slots together."""
        return self.num_slots * self.slot_bytes

    def view(self, slot: int) -> torch.Tensor:
        """See `keepstep.weights.memory.buffers.Buffer`."""
        assert self._memory is not None
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def fill(self, slot: int, source: torch.Tensor, num_bytes: int) -> None:
        """See `keepstep.weights.memory.buffers.Buffer`. A copy from another GPU is peer-to-peer if both support it."""
        own = self.view(slot)[:num_bytes]
        with on_stream(own.device):
            own.copy_(source[:num_bytes], non_blocking=True)

    def share(self) -> tuple[BufferPlace, list[int]]:
        """See `keepstep.weights.memory.buffers.Buffer`. Torch counts the receivers: call it once for each process."""
        assert self._memory is not None
        return BufferPlace(self.num_slots, self.slot_bytes, share_memory(self._memory)), []

    def close(self) -> None:
        """See `keepstep.weights.memory.buffers.Buffer`."""
        self._memory = None


def share_memory(memory: torch.Tensor) -> GpuMemory:
    """Returns the CUDA IPC handle by which one other process on this machine maps a tensor, uint8 [n] on a GPU."""
    index, handle, size, offset, counter, counter_offset, event, must_wait = memory.untyped_storage()._share_cuda_()
    return GpuMemory(uuid_of(index), handle, size, offset, counter, counter_offset, event, must_wait)


def map_memory(gpu: GpuMemory) -> torch.Tensor:
    """Maps another process's tensor, uint8 [n]. This process opens a CUDA context on the tensor's GPU.

    Raises:
        RemoteProtocolError: this process does not see that GPU.
        MemoryNotMapped: CUDA cannot map the memory.
    """
    index = _index_of(gpu.gpu)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            gpu.handle,
            gpu.storage_bytes,
            gpu.offset_bytes,
            gpu.counter,
            gpu.counter_offset,
            gpu.event,
            gpu.must_wait,
        )
    except RuntimeError as error:
        raise MemoryNotMapped(f"memory of GPU {gpu.gpu} of another process: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def uuid_of(index: int) -> str:
    """The UUID of a visible GPU. It does not open a CUDA context."""
    return str(torch.cuda.get_device_properties(index).uuid)


def visible_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs that this process sees, in its order."""
    if not torch.cuda.is_available():
        return ()
    return tuple(map(uuid_of, range(torch.cuda.device_count())))


def _index_of(uuid: str) -> int:
    """The CUDA device index of a GPU in this process."""
    seen = visible_gpus()
    if uuid not in seen:
        raise RemoteProtocolError(f"a buffer is on GPU {uuid}, which this process does not see (CUDA_VISIBLE_DEVICES)")
    return seen.index(uuid)
