"""The nodes of a simulated job: their processes, their agents, and what is under way from them to the controller."""

from __future__ import annotations

import dataclasses
from collections import deque

from tests.protocol.simulated_worker import SimulatedWorker

from keepstep.protocol.messages import (
    AnyMessage,
    Assign,
    EndJob,
    FenceWorker,
    MembershipTold,
    NodeJoined,
    OnceAnswered,
    StartWorker,
    WorkerFenced,
    WorkerStarted,
)
from keepstep.protocol.recovery import Effect


@dataclasses.dataclass(slots=True)
class SimulatedNode:
    """One node that is up: what it offered, and what its agent knows."""

    offer: NodeJoined
    ranks: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """worker -> the rank that it holds, for every process there."""


class SimulatedNodes:
    """All nodes of a job, and their workers."""

    def __init__(self) -> None:
        self.workers: dict[int, SimulatedWorker] = {}
        """The processes that exist."""
        self.nodes: dict[str, SimulatedNode] = {}
        """The nodes that are up."""
        self.dark: list[NodeJoined] = []
        """The nodes that are lost, without the controller's knowledge yet."""
        self.reports: dict[object, deque[AnyMessage]] = {}
        """What is under way to the controller; within one queue the order is kept."""
        self.handed: list[tuple[tuple[int, ...], AnyMessage]] = []
        """Every order for workers, and those whom their agents gave it to."""
        self._placed: dict[int, str] = {}
        self.most_per_node = 0
        """So many processes a node takes in where it must."""

    def offer(self, name: str, slots: int, domain: str = "") -> None:
        """A node comes up and offers itself."""
        offer = NodeJoined(name, slots, domain, 0, 0, (), slots)
        self.nodes[name] = SimulatedNode(offer)
        self._queue(("agent", name), offer)

    def lose_node(self, name: str) -> None:
        """Its power fails: nothing runs there any more, and nothing more of it arrives. Its lease is yet to expire."""
        node = self.nodes.pop(name)
        for number in node.ranks:
            del self.workers[number]
        for source in [source for source in self.reports if self._sender(source) == name]:
            del self.reports[source]
        self.dark.append(node.offer)

    def handed_to(self, kind: type) -> list[tuple[int, ...]]:
        """For each order of one type, the workers that it was given to."""
        return [workers for workers, order in self.handed if isinstance(order, kind)]

    def _exit(self, worker: SimulatedWorker) -> None:
        del self.workers[worker.number]
        del self.nodes[worker.node].ranks[worker.number]

    def _queue(self, source: object, message: AnyMessage) -> None:
        """``source``: the number of a worker, or a pair with the name of a node for what its agent says itself."""
        self.reports.setdefault(source, deque()).append(message)

    def _sender(self, source: object) -> str:
        """The node whose agent sends what is in a queue."""
        return self._placed[source] if isinstance(source, int) else source[1]

    def _obey(self, effect: Effect) -> None:
        """The agents carry out one order of the controller."""
        if effect.node is None:
            self._hand_over(effect.order)
        elif effect.node in self.nodes:
            self._obey_alone(self.nodes[effect.node], effect.order)
        else:
            assert effect.node in [node.node for node in self.dark], f"{effect.order} for a node that is not there"

    def _obey_alone(self, node: SimulatedNode, order: AnyMessage) -> None:
        match order:
            case StartWorker(number, rank):
                name = node.offer.node
                assert number not in self._placed, f"worker {number} is started twice"
                most = max(node.offer.slots, self.most_per_node)
                assert len(node.ranks) < most, f"all {most} slots of {name} are taken"
                self._placed[number] = name
                node.ranks[number] = rank
                self.workers[number] = SimulatedWorker(number, name, rank)
                self._queue(number, WorkerStarted(number, 4000 + number))
            case FenceWorker(number):
                if number in node.ranks:
                    self.workers[number].dying = True
                else:
                    self._queue(number, WorkerFenced(number))
            case Assign(number):
                if number in node.ranks:
                    node.ranks[number] = order.rank
                    self.workers[number].orders.append(order)
                    self.handed.append(((number,), order))
            case MembershipTold():
                pass  # what agents make of it is tested with real agents
            case OnceAnswered():
                pass  # no model asks; a test does, and looks at the answers
            case _:
                raise AssertionError(f"{order} was sent to one node only")

    def _hand_over(self, order: AnyMessage) -> None:
        """An order for every rank: each agent gives it to those who hold one. The last one is for the agents."""
        nodes = self.nodes.values()
        holders = tuple(number for node in nodes for number, rank in node.ranks.items() if rank is not None)
        if holders and not isinstance(order, EndJob):
            self.handed.append((holders, order))
            for number in holders:
                self.workers[number].orders.append(order)
