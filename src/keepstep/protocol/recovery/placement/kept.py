"""The snapshots of ranks in the memory of nodes: those that lost workers left, and second copies at buddies."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.protocol.recovery.placement.roster import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class KeptSnapshots:
    """The snapshots of one rank in one worker's memory."""

    rank: int
    worker: int
    node: str
    steps: frozenset[int]
    is_own: bool
    """Whether that worker held the rank itself. If not, it is or was the rank's buddy."""
    is_live: bool
    """Whether that worker is alive."""


class SnapshotRegister:
    """The known snapshots of each rank.

    Entries of dead workers last until all ranks have new snapshots. Entries of live workers last until the next stop.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[int, list[KeptSnapshots]] = defaultdict(list)

    def left(self, worker: Worker, snapshots: SnapshotsByRank) -> None:
        """Records the snapshots that a dead worker has left."""
        self.forget(worker)
        for rank, steps in snapshots:
            is_own = rank == worker.rank
            self._kept[rank].append(
                KeptSnapshots(rank, worker.worker, worker.node, frozenset(steps), is_own, is_live=False)
            )

    def keeps(self, worker: Worker, second_copies: SnapshotsByRank) -> None:
        """Records the second copies that a live worker keeps."""
        for rank, steps in second_copies:
            copies = KeptSnapshots(rank, worker.worker, worker.node, frozenset(steps), is_own=False, is_live=True)
            self._kept[rank].append(copies)

    def forget(self, worker: Worker) -> None:
        """Forgets the second copies of a live worker."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if not kept.is_live or kept.worker != worker.worker]

    def forget_live(self) -> None:
        """Forgets the second copies of all live workers, which are about to report them again."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if not kept.is_live]

    @property
    def has_second_copies(self) -> bool:
        """Whether a live worker keeps second copies of another rank."""
        return any(kept.is_live for listed in self._kept.values() for kept in listed)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have known snapshots."""
        return [rank for rank, listed in self._kept.items() if listed]

    def all_of(self, rank: int) -> Sequence[KeptSnapshots]:
        """Returns all known snapshots of a rank, except for those of its own live worker."""
        return self._kept.get(rank, ())

    def of(self, rank: int, step: int) -> list[KeptSnapshots]:
        """Returns the entries with a rank's snapshot of a step."""
        return [kept for kept in self.all_of(rank) if step in kept.steps]

    def on_node(self, rank: int, node: str) -> list[KeptSnapshots]:
        """Returns the entries that a replacement on a node can load."""
        return [kept for kept in self.all_of(rank) if kept.node == node and kept.steps]

    def node_lost(self, node: str) -> None:
        """Forgets all snapshots on a lost node."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if kept.node != node]

    def resumed(self, step: int) -> None:
        """Forgets snapshots of later steps when all ranks resume at ``step``: those steps are computed again."""
        for rank, listed in self._kept.items():
            earlier = [
                dataclasses.replace(kept, steps=frozenset(s for s in kept.steps if s <= step)) for kept in listed
            ]
            self._kept[rank] = earlier

    def release(self) -> dict[str, tuple[int, ...]]:
        """Forgets everything, because all ranks have new snapshots.

        Returns:
            node -> dead workers whose snapshots are not needed any more.
        """
        by_node: defaultdict[str, set[int]] = defaultdict(set)
        for listed in self._kept.values():
            for kept in listed:
                if not kept.is_live:
                    by_node[kept.node].add(kept.worker)
        self._kept.clear()
        return {node: tuple(sorted(workers)) for node, workers in by_node.items()}
