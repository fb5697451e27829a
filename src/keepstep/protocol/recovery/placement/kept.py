"""The snapshots that nodes hold of lost ranks: their own, and second copies with their buddies."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from keepstep.protocol.messages import SnapshotsByRank
from keepstep.protocol.recovery.placement.roster import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class KeptSnapshots:
    """What one worker's memory holds of a rank's snapshots."""

    rank: int
    worker: int
    node: str
    steps: frozenset[int]
    is_own: bool
    """Whether that worker held the rank itself. If not it is, or was, the rank's buddy."""
    is_live: bool
    """Whether that worker is alive."""


class SnapshotRegister:
    """By rank. Those of workers that are gone stand until all ranks have their snapshots again, others until a stop."""

    def __init__(self) -> None:
        self._kept: defaultdict[int, list[KeptSnapshots]] = defaultdict(list)

    def left(self, worker: Worker, snapshots: SnapshotsByRank) -> None:
        """A rank's process is gone, and has left these."""
        self.forget(worker)
        for rank, steps in snapshots:
            is_own = rank == worker.rank
            self._kept[rank].append(
                KeptSnapshots(rank, worker.worker, worker.node, frozenset(steps), is_own, is_live=False)
            )

    def keeps(self, worker: Worker, second_copies: SnapshotsByRank) -> None:
        """A live worker keeps these."""
        for rank, steps in second_copies:
            copies = KeptSnapshots(rank, worker.worker, worker.node, frozenset(steps), is_own=False, is_live=True)
            self._kept[rank].append(copies)

    def forget(self, worker: Worker) -> None:
        """A live worker keeps nothing that is known of."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if not kept.is_live or kept.worker != worker.worker]

    def forget_live(self) -> None:
        """All live workers are about to report again which snapshots they keep."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if not kept.is_live]

    @property
    def has_second_copies(self) -> bool:
        """Whether a rank that is alive keeps snapshots of another one."""
        return any(kept.is_live for listed in self._kept.values() for kept in listed)

    def all_of(self, rank: int) -> Sequence[KeptSnapshots]:
        """What is known of a rank's snapshots, except for those in the memory of its live worker."""
        return self._kept.get(rank, ())

    def of(self, rank: int, step: int) -> list[KeptSnapshots]:
        """Where the snapshot of a step is."""
        return [kept for kept in self.all_of(rank) if step in kept.steps]

    def on_node(self, rank: int, node: str) -> list[KeptSnapshots]:
        """What a replacement on a node can load."""
        return [kept for kept in self.all_of(rank) if kept.node == node and kept.steps]

    def node_lost(self, node: str) -> None:
        """What it held is gone."""
        for rank, listed in self._kept.items():
            self._kept[rank] = [kept for kept in listed if kept.node != node]

    def resumed(self, step: int) -> None:
        """All ranks resume at ``step``: snapshots of later steps are of a past that is computed again."""
        for rank, listed in self._kept.items():
            earlier = [
                dataclasses.replace(kept, steps=frozenset(s for s in kept.steps if s <= step)) for kept in listed
            ]
            self._kept[rank] = earlier

    def release(self) -> dict[str, tuple[int, ...]]:
        """All ranks have their snapshots: what is kept may go. Workers that are gone, by node."""
        by_node: defaultdict[str, set[int]] = defaultdict(set)
        for listed in self._kept.values():
            for kept in listed:
                if not kept.is_live:
                    by_node[kept.node].add(kept.worker)
        self._kept.clear()
        return {node: tuple(sorted(workers)) for node, workers in by_node.items()}
