"""A simulated job in one process: a cluster and an oracle, run in virtual time from one seed."""

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
from keepstep.sim.cluster.values import History, LostValue, Rows
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.oracle import Oracle
from keepstep.sim.story import Story

if TYPE_CHECKING:
    from keepstep.sim.recording import Recording


class World:
    """One run, with all its parts. Each event is a method of one part."""

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
        """Process number -> the process, for all processes of the run, also dead ones."""
        self.ended: EndJob | None = None
        self.watch: Callable[[SimulatedProcess], None] | None = None
        """Called with a worker after each new tag. A scenario sets it, and a plan whose fault waits for a phase."""
        self.recording: Recording | None = None
        self.num_recoveries = 0
        self.num_loads_refused = 0
        self.wrong_loads: list[bool] = []
        """For each load that will give another state than was loaded: whether it shows only in the next update."""
        """Number of coming loads after which the state is not what was loaded."""
        self.waiting_for_recovery: list[tuple[int, float, Event]] = []
        """(number of a recovery, seconds after its beginning, event)."""
        self._checkpoints: dict[int, dict[str, tuple[History, Rows]]] = {}
        """step -> shard -> its part of the checkpoint."""
        self._whole_s: dict[int, float] = {}
        """step -> the time at which its checkpoint was complete."""
        self.recovery_began_s = 0.0
        self._frozen: dict[str, list[Event]] = {}
        """Name of a paused part -> its events since then."""
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
        """Starts the controller and every node."""
        self.controller.boot()
        for node in self.nodes.values():
            node.boot()
            if self.relays.all:
                self.relays.connect(node.name)

    def happen(self, event: Event) -> None:
        """Runs one event. A paused part runs it when it resumes."""
        if event.part in self._frozen:
            self._frozen[event.part].append(event)
            return
        if self.story is not None:
            self.story.tell(self, event)
        getattr(self.part(event.part), event.what)(*event.arguments)

    def freeze(self, part: str) -> None:
        """Pauses a part: its events happen when it resumes."""
        self._frozen.setdefault(part, [])

    def kill(self, part: str) -> None:
        """Drops the events of a part that is paused, because it was killed."""
        self._frozen.pop(part, None)

    def thaw(self, part: str) -> None:
        """Resumes a paused part, with the events that it has missed."""
        for event in self._frozen.pop(part, []):
            self.schedule.after(0.0, event)

    # ---- what parts ask ---------------------------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        """Returns a part by its name: a node, the controller, ``worker P`` for process P."""
        return self._parts[name]

    def add_part(self, name: str, part: object) -> None:
        """Adds a part that events can call."""
        self._parts[name] = part

    def draw(self, duration_s: float) -> float:
        """Returns a random duration between 0.7 and 1.3 times this one."""
        return duration_s * (0.7 + 0.6 * self.rng.random())

    def coin(self) -> bool:
        """Returns True with a probability of one half."""
        return self.rng.random() < 0.5

    def fate_of_lost_value(self) -> LostValue:
        """Returns what becomes on one rank of a value that was cut off: harm with a probability of one half."""
        if not self.coin():
            return LostValue.NOWHERE
        if not self.coin():
            return LostValue.DECIDED
        return LostValue.WRITTEN if self.coin() else LostValue.DECIDED_ALONE

    def shard_of(self, rank: int | None) -> str:
        """Returns the shard that a rank holds."""
        return self.layout.shards[rank or 0]

    def rank_holders(self) -> list[SimulatedWorker]:
        """Returns the live processes that were assigned a rank."""
        return [worker for worker in self.workers.values() if worker.is_alive and worker.machine.rank is not None]

    def spares(self) -> list[SimulatedWorker]:
        """Returns the live processes without a rank."""
        return [worker for worker in self.workers.values() if worker.is_alive and worker.machine.rank is None]

    # ---- what parts report ------------------------------------------------------------------------------------------

    def add_process(self, node: SimulatedNode, wanted: Spawn) -> SimulatedWorker:
        """Adds a process that a node has started."""
        process = len(self.workers) + 1
        worker = SimulatedWorker(self, node, process, wanted)
        self.workers[process] = self._parts[f"worker {process}"] = worker
        return worker

    def process_ended(self, worker: SimulatedProcess) -> None:
        """Tells its node that a process has ended."""
        self.nodes[worker.node.name].ended(worker)

    def step_completed(self, worker: SimulatedProcess, step: int) -> None:
        """Handles a step that a rank has completed. Writes a checkpoint if one is due."""
        self.oracle.completed(worker, step)
        if (every := self.layout.checkpoint_every) and (step + 1) % every == 0:
            self.checkpoint(worker, step + 1)
        self.nodes[worker.node.name].step_completed(worker, worker.machine.generation, step)

    def checkpoint(self, worker: SimulatedProcess, step: int) -> bool:
        """Writes a rank's part of a checkpoint, if the job has checkpoints and the rank is the first of its shard.

        Returns:
            whether it has written one.
        """
        rank, shard = worker.machine.rank, self.shard_of(worker.machine.rank)
        if self.layout.checkpoint_every is None or self.layout.shards.index(shard) != rank:
            return False
        parts = self._checkpoints.setdefault(step, {})
        parts[shard] = worker.parameters, worker.local.rows
        if len(parts) == len(set(self.layout.shards)):
            self._whole_s.setdefault(step, self.schedule.now_s)
            worker.has_written(step)
        return True

    def loadable_by(self, worker: SimulatedProcess) -> tuple[int, ...]:
        """Returns the steps of the checkpoints and snapshots that a worker can load, ascending."""
        return tuple(sorted({*self.checkpoints(), *worker.snapshots.steps(worker.machine.rank)}))

    def checkpoints(self, before_s: float = math.inf) -> list[int]:
        """Returns the steps whose checkpoints were complete before a time, by default now, ascending."""
        return sorted(step for step, whole_s in self._whole_s.items() if whole_s < before_s)

    def room(self) -> int:
        """Returns for how many ranks the nodes that are up have room."""
        limit = self.layout.settings.ranks_per_node
        up = [node for node in self.nodes.values() if node.is_up]
        slots = [node.layout.slots - len(node.closed) for node in up]
        return sum(min(each, limit or each) for each in slots)

    def read_checkpoint(self, shard: str, step: int) -> tuple[History, Rows]:
        """Returns a shard's parameters in a checkpoint, and the table of the ranks' own values."""
        return self._checkpoints[step][shard]

    def tag_shown(self, worker: SimulatedProcess) -> None:
        """Handles a write to a worker's tag page."""
        if self.watch is not None:
            self.watch(worker)
        if self.recording is not None:
            self.recording.shown(worker)

    def moment_shown(self, worker: SimulatedProcess, moment: SnapshotMoment, step: int) -> None:
        """Handles an event of a worker's snapshot on its tag page."""
        if self.recording is not None:
            self.recording.moment(worker, moment, step, self.schedule.now_s)

    def orders_given(self, entry: JournalEntry) -> None:
        """Handles an entry that the controller has written to its journal."""
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
        """Handles the end of the job."""
        if self.ended is None:
            self.ended = order
            self.oracle.job_ended(order)
