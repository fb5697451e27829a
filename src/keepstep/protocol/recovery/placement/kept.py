"""The snapshots that nodes still hold of workers that are gone."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from keepstep.protocol.recovery.placement.roster import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class KeptSnapshots:
    """What one worker has left in the memory that its agent holds."""

    worker: int
    node: str
    steps: frozenset[int]


class SnapshotRegister:
    """By rank, until all ranks have snapshots of their own again."""

    def __init__(self) -> None:
        self._kept: defaultdict[int, list[KeptSnapshots]] = defaultdict(list)

    def add(self, worker: Worker, steps: Iterable[int]) -> None:
        """A rank's process is gone, and has left these."""
        if worker.rank is not None and (found := frozenset(steps)):
            self._kept[worker.rank].append(KeptSnapshots(worker.worker, worker.node, found))

    def of(self, rank: int) -> list[KeptSnapshots]:
        """What is left of a rank's former processes."""
        return self._kept.get(rank, [])

    def steps(self, rank: int) -> frozenset[int]:
        """The steps to which a replacement can bring the rank."""
        return frozenset().union(*(kept.steps for kept in self.of(rank)))

    def on_node(self, rank: int, node: str) -> list[KeptSnapshots]:
        """What a replacement on a node can load."""
        return [kept for kept in self.of(rank) if kept.node == node and kept.steps]

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
        """All ranks have snapshots of their own: what is kept may go, workers by node."""
        by_node: defaultdict[str, list[int]] = defaultdict(list)
        for listed in self._kept.values():
            for kept in listed:
                by_node[kept.node].append(kept.worker)
        self._kept.clear()
        return {node: tuple(sorted(workers)) for node, workers in by_node.items()}
