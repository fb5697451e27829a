"""The orders of one event, collected until the machine has processed it."""

from __future__ import annotations

import dataclasses

from keepstep.protocol.messages import AgentOrder, Assign, FenceWorker, FirstPhases, StartWorker
from keepstep.protocol.recovery.placement.roster import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An order to the agent of one node or of all nodes, with its reason."""

    node: str | None
    """The node; None: all nodes get the same order."""
    order: AgentOrder
    reason: str


@dataclasses.dataclass(slots=True)
class Orders:
    """Collects the orders of an event, each with its node and reason."""

    _effects: list[Effect] = dataclasses.field(default_factory=list)

    def take(self) -> list[Effect]:
        """Returns the effects since the last call, in the order in which they were added."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, node: str | None, order: AgentOrder, reason: str) -> None:
        """Adds an order for one node, or for all nodes if ``node`` is None."""
        self._effects.append(Effect(node, order, reason))

    def start(self, worker: Worker, reason: str) -> None:
        """Orders the agent to start a new worker's process."""
        local = (worker.local_rank, worker.local_world_size)
        self.send(worker.node, StartWorker(worker.worker, worker.rank, worker.device, *local, reason), reason)

    def assign(self, worker: Worker, generation: int, first_phases: FirstPhases, reason: str) -> None:
        """Orders a worker to hold its rank in a generation. Its agent learns the longest first phases of the job."""
        assert worker.rank is not None
        assert worker.local_rank is not None
        local = (worker.local_rank, worker.local_world_size)
        self.send(worker.node, Assign(worker.worker, generation, worker.rank, *local, None, first_phases), reason)

    def fence(self, worker: Worker, reason: str) -> None:
        """Orders the agent to kill a worker's process."""
        self.send(worker.node, FenceWorker(worker.worker, reason), reason)

    def to_all(self, order: AgentOrder, reason: str) -> None:
        """Adds an order for all nodes, which is for all rank holders or for the agents themselves."""
        self.send(None, order, reason)
