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
    """A reader's connection to a source device.

    Attributes:
        connection: connection to the source.
        buffer: H2D buffer of the source.
        first_slot: number by which the reader's consumers know the buffer's first slot, if they map it as well.
    """

    connection: Connection
    buffer: Buffer
    first_slot: int

    def close(self) -> None:
        """Closes the connection and unmaps the buffer."""
        self.connection.close()
        self.buffer.close()


class SourceConnections:
    """This device's connections to all sources. A connection that has ended is reopened before the next update."""

    def __init__(
        self, folder: Path, rank: int, world_size: int, buffers_on: torch.device, first_slot: Callable[[int], int]
    ) -> None:
        """Args:
        folder: folder of the listeners.
        rank, world_size: rank of this device, and number of devices.
        buffers_on: device of the buffers; its type is the same on all ranks.
        first_slot: returns the first slot number for a rank; see `SourceBuffer`.
        """
        self._folder, self._rank, self._world_size, self._buffers_on = folder, rank, world_size, buffers_on
        self._first_slot = first_slot
        self.sources: dict[int, SourceBuffer] = {}

    def connect(self, generation: int, until_s: float, stop: CancelToken) -> None:
        """Opens the missing connections.

        Args:
            generation: generation of the membership.
            until_s: deadline on the monotonic clock.
            stop: cancels the wait.

        Raises:
            ConnectionStalled: a device did not answer in time.
            StaleGeneration: ``generation`` is over.
            Cancelled: ``stop`` was set.
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
        """Closes every connection, so that messages of an aborted update cannot reach a later one."""
        for rank in list(self.sources):
            self.sources.pop(rank).close()
