"""One device's connections as a reader to all devices, including itself, and their H2D buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from keepstep.cancel import CancelToken
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer.messages import DeviceCalled
from keepstep.weights.channels.connection import Connection
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial_rank
from keepstep.weights.memory.buffers import Buffer


@dataclasses.dataclass(frozen=True, slots=True)
class SourceBuffer:
    """A device as one that reads from it sees it.

    Attributes:
        connection: to it.
        buffer: its H2D buffer.
        first_slot: number of the buffer's first slot for the consumers of the device that reads, if they map it, too.
    """

    connection: Connection
    buffer: Buffer
    first_slot: int

    def close(self) -> None:
        """Ends the connection, and maps the buffer no more."""
        self.connection.close()
        self.buffer.close()


class SourceConnections:
    """Opened by this device; each connection that has ended is opened again before the next update."""

    def __init__(
        self, folder: Path, rank: int, world_size: int, buffers_on: torch.device, first_slot: Callable[[int], int]
    ) -> None:
        """Args:
        folder: of the listeners.
        rank, world_size: of this device.
        buffers_on: where all devices have their buffers.
        first_slot: of each rank; see `SourceBuffer`.
        """
        self._folder, self._rank, self._world_size, self._buffers_on = folder, rank, world_size, buffers_on
        self._first_slot = first_slot
        self.sources: dict[int, SourceBuffer] = {}

    def connect(self, generation: int, until_s: float, stop: CancelToken) -> None:
        """Opens what is missing.

        Raises:
            ConnectionStalled: a device's listener stays closed.
            StaleGeneration: ``generation`` is over.
            Cancelled: by ``stop``.
        """
        for rank, source in list(self.sources.items()):
            if source.connection.has_ended:
                self.sources.pop(rank).close()
        for rank in range(self._world_size):
            if rank not in self.sources:
                self.sources[rank] = self._open(rank, generation, until_s, stop)

    def _open(self, rank: int, generation: int, until_s: float, stop: CancelToken) -> SourceBuffer:
        introduction = DeviceCalled(self._rank, generation)
        connection, welcomed = dial_rank(self._folder, rank, introduction, until_s, stop)
        buffer = attach_buffer(welcomed.buffer, connection)
        kind = buffer.view(0).device.type
        if kind != self._buffers_on.type:  # the checksums are not the same
            raise RemoteProtocolError(f"rank {rank} has its buffers on {kind}, this rank on {self._buffers_on.type}")
        return SourceBuffer(connection, buffer, self._first_slot(rank))

    def drop(self) -> None:
        """Closes every connection: what an update that broke off left on them shall meet no other."""
        for rank in list(self.sources):
            self.sources.pop(rank).close()
