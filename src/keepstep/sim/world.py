"""The whole job in one process: a cluster, its faults and an oracle, run in virtual time from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.messages import EndJob
from keepstep.protocol.node.effects import Spawn
from keepstep.shared.tagpage import SnapshotMoment
from keepstep.sim.cluster.collectives import Collectives, SimulatedRendezvous
from keepstep.sim.cluster.control.network import CONTROLLER, Network
from keepstep.sim.cluster.control.relays import Relays
from keepstep.sim.cluster.controller import SimulatedController
from keepstep.sim.cluster.layout import ClusterLayout
from keepstep.sim.cluster.node import SimulatedNode
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event, Schedule
from keepstep.sim.cluster.scripts.once import OnceScript
from keepstep.sim.cluster.scripts.startup import StartUpScript
from keepstep.sim.cluster.transfers import SimulatedSecondCopies, Transfers
from keepstep.sim.cluster.values import History, Rows
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.oracle import Oracle
from keepstep.sim.story import Story

if TYPE_CHECKING:
    from keepstep.sim.recording import Recording


class World:
    """One run. Parts find each other here; each event is a method of one part."""

    def __init__(self, layout: ClusterLayout, seed: int, story: Story | None = None) -> None:
        self.layout = layout
        self.story = story
        self.rng = random.Random(seed)
        self.schedule = Schedule()
        self.oracle = Oracle(self)
        self.once = OnceScript(self)
        self.start_up = StartUpScript(self, seed)
        self.network = Network(self, layout.network)
        self.relays = Relays(self, layout.num_relays)
        self.collectives = Collectives(self)
        self.rendezvous = SimulatedRendezvous(self)
        self.transfers = Transfers(self)
        self.second_copies = SimulatedSecondCopies(self)
        self.controller = SimulatedController(self)
        self.nodes = {node.name: SimulatedNode(self, node) for node in layout.nodes}
        self.workers: dict[int, SimulatedWorker] = {}
        """Every process there ever was."""
        self.ended: EndJob | None = None
        self.watch: Callable[[SimulatedProcess], None] | None = None
        """Told of each new tag of a worker: a scenario watches, and a plan once a fault waits for its phase."""
        self.recording: Recording | None = None
        self.num_recoveries = 0
        self.waiting_for_recovery: list[tuple[int, float, Event]] = []
        """(number of the recovery, seconds after its beginning, what happens then)."""
        self._checkpoints: dict[int, dict[str, tuple[History, Rows]]] = {}
        """step -> shard -> what was written."""
        self._whole_s: dict[int, float] = {}
        """step -> since when its checkpoint is whole."""
        self.recovery_began_s = 0.0
        self._frozen: dict[str, list[Event]] = {}
        """Programs that are held up, with what has happened to them since."""
        self._parts: dict[str, Any] = {
            "world": self,
            "network": self.network,
            "relays": self.relays,
            **{relay.name: relay for relay in self.relays.all},
            "collectives": self.collectives,
            "transfers": self.transfers,
            "second_copies": self.second_copies,
            "oracle": self.oracle,
            "once": self.once,
            "start-up": self.start_up,
            CONTROLLER: self.controller,
            **self.nodes,
        }

    def boot(self) -> None:
        """The controller and every node come up."""
        self.controller.boot()
        for node in self.nodes.values():
            node.boot()
            if self.relays.all:
                self.relays.connect(node.name)

    def happen(self, event: Event) -> None:
        """One event."""
        if event.part in self._frozen:
            self._frozen[event.part].append(event)
            return
        if self.story is not None:
            self.story.tell(self, event)
        getattr(self.part(event.part), event.what)(*event.arguments)

    def freeze(self, part: str) -> None:
        """A program is held up: what happens to it happens when it goes on."""
        self._frozen.setdefault(part, [])

    def kill(self, part: str) -> None:
        """A program that is held up is ended: what has happened to it meanwhile is lost."""
        self._frozen.pop(part, None)

    def thaw(self, part: str) -> None:
        """It goes on."""
        for event in self._frozen.pop(part, []):
            self.schedule.after(0.0, event)

    # ---- what parts ask ---------------------------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        """A part by its name: a node, the controller, ``worker P`` for process P."""
        return self._parts[name]

    def add_part(self, name: str, part: object) -> None:
        """One more part that events can happen to."""
        self._parts[name] = part

    def draw(self, duration_s: float) -> float:
        """About so long."""
        return duration_s * (0.7 + 0.6 * self.rng.random())

    def coin(self) -> bool:
        """Yes or no."""
        return self.rng.random() < 0.5

    def shard_of(self, rank: int | None) -> str:
        """The shard that a rank holds."""
        return self.layout.shards[rank or 0]

    def rank_holders(self) -> list[SimulatedWorker]:
        """The live processes that believe they hold a rank."""
        return [worker for worker in self.workers.values() if worker.is_alive and worker.machine.rank is not None]

    def spares(self) -> list[SimulatedWorker]:
        """The live processes without a rank."""
        return [worker for worker in self.workers.values() if worker.is_alive and worker.machine.rank is None]

    # ---- what parts tell --------------------------------------------------------------------------------------------

    def add_process(self, node: SimulatedNode, wanted: Spawn) -> SimulatedWorker:
        """A process has been started."""
        process = len(self.workers) + 1
        worker = SimulatedWorker(self, node, process, wanted)
        self.workers[process] = self._parts[f"worker {process}"] = worker
        return worker

    def process_ended(self, worker: SimulatedProcess) -> None:
        """A process has ended, for any reason."""
        self.nodes[worker.node.name].ended(worker)

    def step_completed(self, worker: SimulatedProcess, step: int) -> None:
        """A rank has completed a step: it may be time for a checkpoint."""
        self.oracle.completed(worker, step)
        if (every := self.layout.checkpoint_every) and (step + 1) % every == 0:
            self.checkpoint(worker, step + 1)
        self.nodes[worker.node.name].step_completed(worker, worker.machine.generation, step)

    def checkpoint(self, worker: SimulatedProcess, step: int) -> bool:
        """The first rank of each shard writes a checkpoint, in a job that has them. Says whether this one did."""
        rank, shard = worker.machine.rank, self.shard_of(worker.machine.rank)
        if self.layout.checkpoint_every is None or self.layout.shards.index(shard) != rank:
            return False
        parts = self._checkpoints.setdefault(step, {})
        parts[shard] = worker.parameters, worker.local.rows
        if len(parts) == len(set(self.layout.shards)):
            self._whole_s.setdefault(step, self.schedule.now_s)
        return True

    def loadable_by(self, worker: SimulatedProcess) -> tuple[int, ...]:
        """The steps of the checkpoints and snapshots that a worker can load."""
        return tuple(sorted({*self.checkpoints(), *worker.snapshots.steps(worker.machine.rank)}))

    def checkpoints(self, before_s: float = math.inf) -> list[int]:
        """The steps of which there was a whole checkpoint at a time, by default now."""
        return sorted(step for step, whole_s in self._whole_s.items() if whole_s < before_s)

    def room(self) -> int:
        """How many ranks the machines that are up have room for."""
        limit = self.layout.settings.ranks_per_node
        up = [node for node in self.nodes.values() if node.is_up]
        slots = [node.layout.slots - len(node.closed) for node in up]
        return sum(min(each, limit or each) for each in slots)

    def read_checkpoint(self, shard: str, step: int) -> tuple[History, Rows]:
        """What a checkpoint holds of a shard, and the table of the ranks' own values."""
        return self._checkpoints[step][shard]

    def tag_shown(self, worker: SimulatedProcess) -> None:
        """A worker's page shows something new."""
        if self.watch is not None:
            self.watch(worker)
        if self.recording is not None:
            self.recording.shown(worker)

    def moment_shown(self, worker: SimulatedProcess, moment: SnapshotMoment, step: int) -> None:
        """A worker's page shows what became of a snapshot."""
        if self.recording is not None:
            self.recording.moment(worker, moment, step, self.schedule.now_s)

    def orders_given(self, entry: JournalEntry) -> None:
        """The controller has decided something."""
        self.oracle.decided(entry)
        self.oracle.devices.decided(entry)
        if self.recording is not None:
            self.recording.decided(entry)
        if self.story is not None:
            self.story.decide(self, entry)
        if any(type(order).__name__ == "Stop" for _, order, _ in entry.orders):
            self.num_recoveries += 1
            self.recovery_began_s = self.schedule.now_s
            for number, delay_s, event in self.waiting_for_recovery:
                if number == self.num_recoveries:
                    self.schedule.after(delay_s, event)

    def job_ended(self, order: EndJob) -> None:
        """The controller has ended the job."""
        if self.ended is None:
            self.ended = order
            self.oracle.job_ended(order)
