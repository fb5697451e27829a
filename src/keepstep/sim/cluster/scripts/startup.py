"""The start-up exchange of simulated ranks: they submit it to the record, and replacements request it.

A value contains its name and its start-up. Each start-up exchanges some of the names, so an old value is detected if it
is returned for a name that the current start-up has not exchanged. Requests travel outside of packets: they may be
lost, duplicated and late, and are repeated. All of this is drawn from a separate generator.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World

SHARED = ("group/world", "group/first", "group/second")
"""Names of values that are equal on all ranks. Rank 0 submits them. Each rank has one more name of its own."""
AGAIN_S = 0.25
LATE = 0.03
"""Share of the requests and answers that are delayed by up to `LATE_S`."""
LATE_S = 1.0


@dataclasses.dataclass(slots=True)
class ScriptAsking:
    """A process at its first step, with its remaining requests. It sends one at a time."""

    process: int
    todo: list[StoreRequested]


class StartUpScript:
    """The start-up exchange of all processes of a run."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._seed = seed
        self.rng = random.Random(f"start-up of {seed}")
        self._num_requests = 0
        self._asking: dict[int, ScriptAsking] = {}
        """process -> its remaining requests."""
        self._asked: dict[int, tuple[int, StoreRequested]] = {}
        """Number of a request -> (its process, the request), for all requests of the run."""

    def begin(self, worker: SimulatedProcess) -> bool:
        """Begins the exchange of a process at its first step. Returns whether it waits for the controller's answers.

        `SimulatedProcess.has_exchanged` is called when it has them.
        """
        if not self._world.layout.exchanges:
            return False
        todo = self._to_hand_over(worker) if worker.is_first_holder else self._to_ask(worker)
        if todo:
            self._asking[worker.process] = ScriptAsking(worker.process, todo)
            self._send(worker.process)
        else:
            self._has_handed_over(worker)
        return bool(todo)

    def _to_hand_over(self, worker: SimulatedProcess) -> list[StoreRequested]:
        machine, cohort = worker.machine, worker.cohort
        if machine.generation == 0 or machine.used_echo or cohort is None:
            return []
        drawn = random.Random(f"start-up {cohort} of {self._seed}")
        shared = [name for name in SHARED if drawn.random() < 0.6]
        names = [*(shared if machine.rank == 0 else ()), *([own_name(machine.rank)] if drawn.random() < 0.7 else ())]
        return [
            self._request(worker, "keep", name, f"{name} of start-up {cohort}".encode(), machine.generation)
            for name in names
        ]

    def _to_ask(self, worker: SimulatedProcess) -> list[StoreRequested]:
        rank = worker.machine.rank
        names = [*SHARED, *(() if rank is None else (own_name(rank),))]
        return [self._request(worker, "kept", name, b"", 0) for name in names]

    def _request(
        self, worker: SimulatedProcess, operation: str, name: str, value: bytes, generation: int
    ) -> StoreRequested:
        self._num_requests += 1
        request = StoreRequested(worker.number, generation, self._num_requests, operation, (name,), value)
        self._asked[request.request] = worker.process, request
        return request

    # ---- in transit -------------------------------------------------------------------------------------------------

    def _send(self, process: int) -> None:
        (request, *_) = self._asking[process].todo
        self._travel(Event("start-up", "arrive", (process, request)))
        self._world.schedule.after(AGAIN_S, Event("start-up", "ask_again", (process, request.request)))

    def _travel(self, event: Event) -> None:
        """Transmits a request or an answer, which may be lost, duplicated or late."""
        network = self._world.layout.network
        if self.rng.random() < max(network.loss, self._world.network.extra_loss):
            return
        for _ in range(1 + (self.rng.random() < network.duplication)):
            late_s = self.rng.random() * LATE_S if self.rng.random() < LATE else 0.0
            delay_s = self.rng.uniform(network.min_delay_s, network.max_delay_s)
            self._world.schedule.after(delay_s + late_s, event)

    def arrive(self, process: int, request: StoreRequested) -> None:
        """Delivers a request to the controller, if the node can reach it."""
        node = self._world.workers[process].node
        if node.is_up and not self._world.network.is_cut(node.name, CONTROLLER):
            self._world.happen(Event(CONTROLLER, "requested", (node.name, request)))

    def answers(self, answer: StoreAnswered) -> None:
        """Transmits an answer of the controller."""
        process, request = self._asked[answer.request]
        if request.operation == "kept":
            self._world.oracle.start_up.is_given(request.keys[0], answer)
        self._travel(Event("start-up", "answered", (process, answer)))

    def answered(self, process: int, answer: StoreAnswered) -> None:
        """Delivers an answer to a process, if the controller can reach its node."""
        worker = self._world.workers[process]
        if worker.is_alive and not self._world.network.is_cut(CONTROLLER, worker.node.name):
            worker.is_answered(answer)

    def ask_again(self, process: int, number: int) -> None:
        """Repeats a request without an answer. Gives up if its generation is over."""
        asking, worker = self._asking.get(process), self._world.workers[process]
        if asking is None or not worker.is_alive or asking.todo[0].request != number:
            return
        if asking.todo[0].operation == "keep" and worker.machine.is_over(asking.todo[0].generation):
            worker.is_answered(StoreAnswered(worker.number, number, None, ""))
        else:
            self._send(process)

    # ---- at the worker ----------------------------------------------------------------------------------------------

    def heard(self, process: int, answer: StoreAnswered) -> None:
        """Handles an answer at a process that is neither stopped nor stuck."""
        asking, worker = self._asking.get(process), self._world.workers[process]
        if asking is None or asking.todo[0].request != answer.request:
            return  # a duplicate, or late
        request = asking.todo.pop(0)
        if request.operation == "keep":
            if answer.values is None:
                worker.machine.echoed()  # a rank was lost while all started: this start-up does not count
                asking.todo.clear()
            else:
                self._world.oracle.start_up.has_kept(worker, request)
        if asking.todo:
            self._send(worker.process)
            return
        del self._asking[worker.process]
        self._has_handed_over(worker)
        worker.has_exchanged()

    def _has_handed_over(self, worker: SimulatedProcess) -> None:
        if worker.is_first_holder and worker.machine.generation > 0 and not worker.machine.used_echo:
            self._world.oracle.start_up.stands_ready(worker)


def own_name(rank: int | None) -> str:
    """Returns the name of a rank's own value."""
    return f"own/{rank}"
