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
    """The methods of ProcessGroupNCCL beside those of all backends of torch's."""

    def abort(self) -> None:
        """Ends NCCL's kernels, and frees the communicator. It waits for that, and raises where it took longer than the
        timeout of operations (``ProcessGroupNCCL::abort``): it has ended by then, for its future is waited for."""
        ...

    def _start_coalescing(self) -> None:
        """Sends and receives from here on are issued together, and have no handles of their own."""
        ...

    def _end_coalescing(self) -> dist.Work:
        """Issues them; the handle of all."""
        ...

    def get_error(self) -> ErrorType:
        """What torch's watchdog has found. It is set before the watchdog breaks a communicator."""
        ...


class StreamPlace(Protocol):
    """A place on a stream."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...


class StreamDevice(Protocol):
    """A device whose operations run on streams."""

    @property
    def device(self) -> torch.device:
        """Which one it is."""
        ...

    def build(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> NcclBackend:
        """A connected group; it waits for all other members. From any thread.

        Args:
            store: where the members find each other.
            rank: this process's.
            size: number of members.
            name: of the group, for NCCL's log.
            timeout: for each operation.

        Raises:
            RuntimeError: from NCCL, or the store.
        """
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is recorded into a graph."""
        ...

    def end_of(self, works: Sequence[dist.Work]) -> StreamPlace:
        """A place after some operations of torch's, on a stream of its own. From any thread."""
        ...


class CudaDevice:
    """A GPU. Implements `StreamDevice`."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: with its index.
        """
        self.device = device

    def build(self, store: Store, rank: int, size: int, name: str, timeout: timedelta) -> NcclBackend:
        """A connected ProcessGroupNCCL; see `StreamDevice.build`.

        It connects at once, and on this device alone (``eagerConnectSingleDevice``): every operation then uses the one
        communicator, sends and receives too, and the store is not asked any more. NCCL is in its blocking mode, which
        is torch's default since 2.7.1 (``ProcessGroupNCCL::useNonblocking``).
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
        """Whether the current stream is recorded into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def end_of(self, works: Sequence[dist.Work]) -> StreamPlace:
        """An event after the operations; see `StreamDevice.end_of`."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for work in works:
                work.block_current_stream()  # which is `WorkNCCL::synchronize`: it waits for the operation's event
        event = torch.cuda.Event()
        event.record(stream)
        return event
