"""A GPU whose memory is the host's: handles between processes, streams that are at rest, no kernels.

For a process of `run_ranks`: what is put into modules here stays there until the process ends.
"""

import os
from typing import Any

import torch

from keepstep.errors import BufferUnavailable
from keepstep.protocol.transfer.messages import GpuMemory
from keepstep.weights.device import stages
from keepstep.weights.memory import gpu_buffers
from keepstep.weights.memory.buffers import make_buffer
from keepstep.weights.memory.gpu_buffers import GpuBuffer, MemoryNotMapped
from keepstep.weights.memory.gpu_copies import GpuCopy
from keepstep.worker.state import restore

DEVICE = torch.device("cuda", 0)
U8 = torch.uint8


class TwinGpu:
    """One GPU of a machine, as the processes on it see it.

    Attributes:
        is_full: it has no memory left.
        refuses: no process maps another one's memory.
        sees: UUIDs of the GPUs that this process sees.
        num_shared, num_mapped: handles given away, and taken.
    """

    def __init__(self, uuid: str = "GPU-0") -> None:
        self.uuid, self.sees = uuid, (uuid,)
        self.is_full = self.refuses = False
        self.num_shared = self.num_mapped = 0
        self._memory: dict[int, int] = {}
        """Address -> descriptor."""

    def install(self) -> None:
        """From now on this process has it, and its state is taken to be there."""
        for module, name, value in (
            (restore, "device_of", lambda held: DEVICE),
            (restore, "make_buffer", self.make_buffer),
            (restore, "visible_gpus", lambda: self.sees),
            (restore, "uuid_of", lambda index: self.uuid),
            (restore, "copy_of", self.copy_of),
            (stages, "copy_of", self.copy_of),
            (gpu_buffers, "share_memory", self.share),
            (gpu_buffers, "map_memory", self.map),
        ):
            setattr(module, name, value)

    def make_buffer(self, device: torch.device, num_slots: int, slot_bytes: int) -> Any:
        if device.type == "cpu":
            return make_buffer(device, num_slots, slot_bytes)
        if self.is_full:
            raise BufferUnavailable("the twin is full")
        slot_bytes = -(-slot_bytes // 256) * 256
        descriptor = os.memfd_create("twin")
        os.ftruncate(descriptor, num_slots * slot_bytes)
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_slots * slot_bytes, dtype=U8)
        self._memory[memory.data_ptr()] = descriptor
        return GpuBuffer(memory, num_slots, slot_bytes)

    def copy_of(self, slot: torch.Tensor, bucket: Any, held: Any) -> Any:
        return GpuCopy(slot, bucket, held)

    def share(self, memory: torch.Tensor) -> GpuMemory:
        self.num_shared += 1
        handle = f"/proc/{os.getpid()}/fd/{self._memory[memory.data_ptr()]}".encode()
        return GpuMemory(self.uuid, handle, memory.numel(), 0, b"", 0, b"", False)

    def map(self, gpu: GpuMemory) -> torch.Tensor:
        assert gpu.gpu in self.sees
        if self.refuses:
            raise MemoryNotMapped("invalid resource handle")
        self.num_mapped += 1
        return torch.from_file(gpu.handle.decode(), shared=True, size=gpu.storage_bytes, dtype=U8)
