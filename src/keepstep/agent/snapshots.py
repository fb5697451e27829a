"""The memory with the snapshots of the node's workers. The agent keeps it for the workers that take their ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.shared import snapshotfile


class SnapshotMemory:
    """One memory file for each worker. It outlives the worker if it contains snapshots."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """worker -> file descriptor"""

    def create(self, worker: int) -> int:
        """Creates the memory of a new worker. Returns its file descriptor, which this object closes."""
        self._held[worker] = snapshotfile.create(f"snapshots-{worker}")
        return self._held[worker]

    def of(self, worker: int) -> SnapshotsByRank:
        """Returns the snapshots of a running or ended worker: those of its rank, and second copies of other ranks'."""
        if worker not in self._held:
            return ()
        return snapshotfile.steps_by_rank(snapshotfile.whole_snapshots(self._held[worker]))

    def path(self, worker: int) -> str | None:
        """Returns the path by which another process of this node opens a worker's memory; None if it is released."""
        return f"/proc/{os.getpid()}/fd/{self._held[worker]}" if worker in self._held else None

    def ended(self, worker: int) -> None:
        """Releases the memory of a worker that has ended, unless it contains snapshots."""
        if not self.of(worker):
            self.release((worker,), ())

    def release(self, workers: Iterable[int] | None, running: Collection[int]) -> None:
        """Releases memory.

        Args:
            workers: the workers whose memory is released; None: all workers.
            running: workers that may still write to their memory, which is kept.
        """
        for worker in tuple(self._held) if workers is None else workers:
            if worker in self._held and worker not in running:
                os.close(self._held.pop(worker))
