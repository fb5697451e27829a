"""The calls of an NCCL communicator to torch and its GPU. Tests replace this module by a twin on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType, Store

from keepstep.worker.backends.communicator import TorchBackend


class NcclBackend(TorchBackend, Protocol):
    """The methods of ProcessGroupNCCL beside those that all torch backends have."""

    def abort(self) -> None:
        """Ends NCCL's kernels, and frees the communicator. Blocks until then. Raises if that took longer than the
        timeout of operations (``ProcessGroupNCCL::abort``), but only after the abort is complete."""
        ...

    def _start_coalescing(self) -> None:
        """Begins a batch: later sends and receives are issued together, and have no handles of their own."""
        ...

    def _end_coalescing(self) -> dist.Work:
        """Issues the batch. Returns the handle of all of its operations."""
        ...

    def get_error(self) -> ErrorType:
        """The error that torch's watchdog has found. The watchdog sets it before it breaks a communicator."""
        ...


class StreamPlace(Protocol):
    """A place on a stream."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


class StreamDevice(Protocol):
    """A device whose operations run on streams."""

    @property
    def device(self) -> torch.device:
        """The device as a `torch.device`."""
        ...

    def build(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> NcclBackend:
        """Connects a group and returns it. Waits for all other members. From any thread.

        Args:
            store: where the members find each other.
            rank: this process's rank.
            size: number of members.
            name: name of the group, for NCCL's log.
            timeout: timeout of each operation.

        Raises:
            RuntimeError: from NCCL, or the store.
        """
        ...

    def is_capturing(self) -> bool:
        """Whether a graph captures the current stream."""
        ...

    def end_of(self, works: Sequence[dist.Work]) -> StreamPlace:
        """Returns a place after some operations, on a separate stream. From any thread."""
        ...


class CudaDevice:
    """A GPU. Implements `StreamDevice`."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: the GPU, with its index.
        """
        self.device = device

    def build(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> NcclBackend:
        """Connects a ProcessGroupNCCL; see `StreamDevice.build`.

        It connects at once, and on this device alone (``eagerConnectSingleDevice``). Every operation then uses the one
        communicator, sends and receives too, and torch does not use the store any more. NCCL is in its blocking mode,
        which is torch's default since 2.7.1 (``ProcessGroupNCCL::useNonblocking``).
        """
        from torch._C import _distributed_c10d as c10d  # a build without CUDA has no ProcessGroupNCCL

        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.group_name = cast(Any, name)  # a new type of torch's
        backend: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
        backend.eager_connect_single_device(self.device)
        connected: NcclBackend = backend
        return connected

    def is_capturing(self) -> bool:
        """Whether a CUDA graph captures the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def end_of(self, works: Sequence[dist.Work]) -> StreamPlace:
        """Records an event after the operations; see `StreamDevice.end_of`."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for work in works:
                work.block_current_stream()  # which is `WorkNCCL::synchronize`: it waits for the operation's event
        event = torch.cuda.Event()
        event.record(stream)
        return event
