"""The orders of one event, collected until the machine has processed it."""

from __future__ import annotations

import dataclasses

from keepstep.protocol.messages import AgentOrder, Assign, FenceWorker, StartWorker
from keepstep.protocol.recovery.placement.roster import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An order to the agent of one node, and why the machine gives it."""

    node: str | None
    """None: the same to every node."""
    order: AgentOrder
    reason: str


@dataclasses.dataclass(slots=True)
class Orders:
    """Addresses each order, and gives it its reason."""

    _effects: list[Effect] = dataclasses.field(default_factory=list)

    def take(self) -> list[Effect]:
        """All orders since the last call, in the order in which they were given."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, node: str | None, order: AgentOrder, reason: str) -> None:
        """One order for one node, or for every node."""
        self._effects.append(Effect(node, order, reason))

    def start(self, worker: Worker, reason: str) -> None:
        """Has the process of a new worker started."""
        local = (worker.local_rank, worker.local_world_size)
        self.send(worker.node, StartWorker(worker.worker, worker.rank, worker.device, *local, reason), reason)

    def assign(self, worker: Worker, generation: int, reason: str) -> None:
        """Tells a worker which rank it holds."""
        assert worker.rank is not None
        assert worker.local_rank is not None
        local = (worker.local_rank, worker.local_world_size)
        self.send(worker.node, Assign(worker.worker, generation, worker.rank, *local, None), reason)

    def fence(self, worker: Worker, reason: str) -> None:
        """Has the worker's process killed."""
        self.send(worker.node, FenceWorker(worker.worker, reason), reason)

    def to_all(self, order: AgentOrder, reason: str) -> None:
        """The same order for every node: for all rank holders, or for the node itself."""
        self.send(None, order, reason)
