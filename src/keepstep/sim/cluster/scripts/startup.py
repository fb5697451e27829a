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
"""What all ranks get alike; rank 0 hands it over. Beyond that each rank has something of its own."""
AGAIN_S = 0.25
LATE = 0.03
"""Part of the requests that take up to `LATE_S`."""
LATE_S = 1.0


@dataclasses.dataclass(slots=True)
class ScriptAsking:
    """One process at its first step: what it asks the controller, one after the other."""

    process: int
    todo: list[StoreRequested]


class StartUpScript:
    """Of all processes of a run."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._seed = seed
        self.rng = random.Random(f"start-up of {seed}")
        self._num_requests = 0
        self._asking: dict[int, ScriptAsking] = {}
        """By process."""
        self._asked: dict[int, tuple[int, StoreRequested]] = {}
        """Every request there ever was, by its number, with the process."""

    def begin(self, worker: SimulatedProcess) -> bool:
        """A process comes to its first step; whether it has to wait there for the controller's answers.

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

    # ---- on the way -------------------------------------------------------------------------------------------------

    def _send(self, process: int) -> None:
        (request, *_) = self._asking[process].todo
        self._travel(Event("start-up", "arrive", (process, request)))
        self._world.schedule.after(AGAIN_S, Event("start-up", "ask_again", (process, request.request)))

    def _travel(self, event: Event) -> None:
        """From a node to the controller, or back."""
        network = self._world.layout.network
        if self.rng.random() < max(network.loss, self._world.network.extra_loss):
            return
        for _ in range(1 + (self.rng.random() < network.duplication)):
            late_s = self.rng.random() * LATE_S if self.rng.random() < LATE else 0.0
            delay_s = self.rng.uniform(network.min_delay_s, network.max_delay_s)
            self._world.schedule.after(delay_s + late_s, event)

    def arrive(self, process: int, request: StoreRequested) -> None:
        """A request comes out at the controller, if there still is a way."""
        node = self._world.workers[process].node
        if node.is_up and not self._world.network.is_cut(node.name, CONTROLLER):
            self._world.happen(Event(CONTROLLER, "requested", (node.name, request)))

    def answers(self, answer: StoreAnswered) -> None:
        """The controller transmits an answer."""
        process, request = self._asked[answer.request]
        if request.operation == "kept":
            self._world.oracle.start_up.is_given(request.keys[0], answer)
        self._travel(Event("start-up", "answered", (process, answer)))

    def answered(self, process: int, answer: StoreAnswered) -> None:
        """An answer comes out at a node, if there still is a way."""
        worker = self._world.workers[process]
        if worker.is_alive and not self._world.network.is_cut(CONTROLLER, worker.node.name):
            worker.is_answered(answer)

    def ask_again(self, process: int, number: int) -> None:
        """A request has had no answer for a while."""
        asking, worker = self._asking.get(process), self._world.workers[process]
        if asking is None or not worker.is_alive or asking.todo[0].request != number:
            return
        if asking.todo[0].operation == "keep" and worker.machine.is_over(asking.todo[0].generation):
            worker.is_answered(StoreAnswered(worker.number, number, None, ""))
        else:
            self._send(process)

    # ---- at the worker ----------------------------------------------------------------------------------------------

    def heard(self, process: int, answer: StoreAnswered) -> None:
        """An answer has come to a process that can move."""
        asking, worker = self._asking.get(process), self._world.workers[process]
        if asking is None or asking.todo[0].request != answer.request:
            return  # it has come twice, or late
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
    """Under which a rank's own results are kept."""
    return f"own/{rank}"
