"""One device's lines to all devices as their reader, itself among them, and the H2D buffers at the other ends."""

from __future__ import annotations

from pathlib import Path

import torch

from keepstep.errors import RemoteProtocolError
from keepstep.protocol.transfer.messages import DeviceCalled
from keepstep.weights.lines.door import door_path, knock
from keepstep.weights.lines.line import Flag, Line
from keepstep.weights.memory.buffers import Buffer, attach_buffer


class Mesh:
    """Opened by this device; each line that has ended is opened again before the next update."""

    def __init__(self, folder: Path, rank: int, world_size: int, buffers_on: torch.device) -> None:
        self._folder, self._rank, self._world_size, self._buffers_on = folder, rank, world_size, buffers_on
        self.sources: dict[int, tuple[Line, Buffer]] = {}

    def connect(self, generation: int, until_s: float, stop: Flag) -> None:
        """Opens what is missing.

        Raises:
            LineStalled: somebody's door stays closed.
            StaleGeneration: ``generation`` is over.
            Interrupted: by ``stop``.
        """
        for rank, (line, _buffer) in list(self.sources.items()):
            if line.has_ended:
                self._drop_source(rank)
        for rank in range(self._world_size):
            if rank not in self.sources:
                self.sources[rank] = self._open(rank, generation, until_s, stop)

    def _open(self, rank: int, generation: int, until_s: float, stop: Flag) -> tuple[Line, Buffer]:
        introduction = DeviceCalled(self._rank, generation)
        line, welcomed = knock(door_path(self._folder, rank), introduction, f"rank {rank}", until_s, stop)
        buffer = attach_buffer(welcomed.buffer, line)
        kind = buffer.view(0).device.type
        if kind != self._buffers_on.type:  # the checksums are not the same
            raise RemoteProtocolError(f"rank {rank} has its buffers on {kind}, this rank on {self._buffers_on.type}")
        return line, buffer

    def drop(self) -> None:
        """Closes every line: what an update that broke off left on them shall meet no other."""
        for rank in list(self.sources):
            self._drop_source(rank)

    def _drop_source(self, rank: int) -> None:
        line, buffer = self.sources.pop(rank)
        line.close()
        buffer.close()
