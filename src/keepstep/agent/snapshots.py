"""The memory with the snapshots of the node's workers, held for them and for those that take their ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.shared import snapshotfile


class SnapshotMemory:
    """One file for each worker. It outlives the worker where there are snapshots in it."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """worker -> descriptor"""

    def create(self, worker: int) -> int:
        """The memory of a worker that is about to be started. The descriptor stays this object's."""
        self._held[worker] = snapshotfile.create(f"snapshots-{worker}")
        return self._held[worker]

    def of(self, worker: int) -> SnapshotsByRank:
        """The snapshots that a worker has, or had when it ended: its rank's, and second copies of other ranks'."""
        if worker not in self._held:
            return ()
        return snapshotfile.steps_by_rank(snapshotfile.whole_snapshots(self._held[worker]))

    def path(self, worker: int) -> str | None:
        """What another process of this node opens to read them; None where they are gone."""
        return f"/proc/{os.getpid()}/fd/{self._held[worker]}" if worker in self._held else None

    def ended(self, worker: int) -> None:
        """A worker is gone, and with it memory in which there is nothing."""
        if not self.of(worker):
            self.release((worker,), ())

    def release(self, workers: Iterable[int] | None, running: Collection[int]) -> None:
        """Gives memory back.

        Args:
            workers: whose it is; None: of all.
            running: those who may still write to theirs, which stays.
        """
        for worker in tuple(self._held) if workers is None else workers:
            if worker in self._held and worker not in running:
                os.close(self._held.pop(worker))
