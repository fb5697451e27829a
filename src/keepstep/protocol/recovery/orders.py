"""The orders of one event, gathered until the machine has done with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from keepstep.protocol.messages import AgentOrder, FenceWorker, StartWorker
from keepstep.protocol.recovery.stages import Effect
from keepstep.protocol.roster import Roster, Worker


@dataclasses.dataclass(slots=True)
class Orders:
    """Addresses each order to the node of its workers, and gives it its reason."""

    _roster: Roster
    _nodes: Sequence[str]
    _effects: list[Effect] = dataclasses.field(default_factory=list)

    def take(self) -> list[Effect]:
        """All orders since the last call, in the order in which they were given."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, node: str, order: AgentOrder, reason: str) -> None:
        """One order for one node."""
        self._effects.append(Effect(node, order, reason))

    def start(self, worker: Worker, reason: str) -> None:
        """Has the process of a new worker started."""
        self.send(worker.node, StartWorker(worker.worker, worker.rank, reason), reason)

    def fence(self, worker: Worker, reason: str) -> None:
        """Has the worker's process killed."""
        self.send(worker.node, FenceWorker(worker.worker, reason), reason)

    def to_nodes(self, order: AgentOrder, reason: str) -> None:
        """The same order for every node."""
        for node in self._nodes:
            self.send(node, order, reason)

    def to_holders(self, order: Callable[[tuple[int, ...]], AgentOrder], reason: str) -> None:
        """One order per node, for all rank holders there."""
        for node in self._nodes:
            workers = tuple(worker.worker for worker in self._roster.holders() if worker.node == node)
            if workers:
                self.send(node, order(workers), reason)
