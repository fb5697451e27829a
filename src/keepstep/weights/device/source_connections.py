"""One device's connections to all devices as their reader, itself among them, and the H2D buffers at the other ends."""

from __future__ import annotations

from pathlib import Path

import torch

from keepstep.cancel import CancelToken
from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer.messages import DeviceCalled
from keepstep.weights.channels.connection import Connection
from keepstep.weights.channels.flow import attach_buffer
from keepstep.weights.channels.listener import dial_rank
from keepstep.weights.memory.buffers import Buffer


class SourceConnections:
    """Opened by this device; each connection that has ended is opened again before the next update."""

    def __init__(self, folder: Path, rank: int, world_size: int, buffers_on: torch.device) -> None:
        self._folder, self._rank, self._world_size, self._buffers_on = folder, rank, world_size, buffers_on
        self.sources: dict[int, tuple[Connection, Buffer]] = {}

    def connect(self, generation: int, until_s: float, stop: CancelToken) -> None:
        """Opens what is missing.

        Raises:
            ConnectionStalled: a device's listener stays closed.
            StaleGeneration: ``generation`` is over.
            Cancelled: by ``stop``.
        """
        for rank, (connection, _buffer) in list(self.sources.items()):
            if connection.has_ended:
                self._drop_source(rank)
        for rank in range(self._world_size):
            if rank not in self.sources:
                self.sources[rank] = self._open(rank, generation, until_s, stop)

    def _open(self, rank: int, generation: int, until_s: float, stop: CancelToken) -> tuple[Connection, Buffer]:
        introduction = DeviceCalled(self._rank, generation)
        connection, welcomed = dial_rank(self._folder, rank, introduction, until_s, stop)
        buffer = attach_buffer(welcomed.buffer, connection)
        kind = buffer.view(0).device.type
        if kind != self._buffers_on.type:  # the checksums are not the same
            raise RemoteProtocolError(f"rank {rank} has its buffers on {kind}, this rank on {self._buffers_on.type}")
        return connection, buffer

    def drop(self) -> None:
        """Closes every connection: what an update that broke off left on them shall meet no other."""
        for rank in list(self.sources):
            self._drop_source(rank)

    def _drop_source(self, rank: int) -> None:
        connection, buffer = self.sources.pop(rank)
        connection.close()
        buffer.close()
