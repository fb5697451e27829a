"""One simulated node: the real `AgentMachine`, and the processes that it starts, kills and observes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from keepstep.protocol import messages as msg
from keepstep.protocol.messages import Cause
from keepstep.protocol.node.agent import DELIVER_S, AgentMachine
from keepstep.protocol.node.effects import (
    Depart,
    HandOver,
    Kill,
    Leave,
    LookCloser,
    PassMemory,
    ReleaseMemory,
    Signal,
    Spawn,
)
from keepstep.protocol.reliable_channel import ReliableChannel
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import NodeLayout, SimulatedDurations
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.snapshots import SimulatedMemory

if TYPE_CHECKING:
    from keepstep.sim.world import World

DEPART_S = 2 * DELIVER_S
"""How long a node that must leave delivers its reports and waits for the controller's answer."""


class SimulatedNode:
    """A machine with its agent."""

    def __init__(self, world: World, layout: NodeLayout) -> None:
        self.world = world
        self.layout = layout
        self.name = layout.name
        self.is_up = False
        self.is_leaving = False
        """Whether the node drains, so that the controller starts no more processes there."""
        self._is_departing = False
        """Whether its grace period is over."""
        self.workers: dict[int, SimulatedProcess] = {}
        """worker -> its process, for the current incarnation of the agent."""
        self.memories: dict[int, SimulatedMemory] = {}
        """worker -> its memory, for processes that are gone and have left snapshots."""
        self._starting: dict[int, list[msg.WorkerOrder]] = {}
        """worker -> the orders for its process, which does not exist yet."""
        self.closed: set[int] = set()
        """The devices that are sick. They stay so."""
        self.clock_jump_s = 0.0
        self._incarnation = 0
        self._wake_s = 0.0
        self._machine = self._agent()

    def _agent(self) -> AgentMachine:
        closed = tuple(sorted(self.closed))
        slots, domain, num_devices = self.layout.slots, self.layout.domain, self.layout.num_devices
        joined = msg.NodeJoined(self.name, slots, domain, 0, 0, closed, num_devices or slots)
        return AgentMachine(joined, self._incarnation, self.world.layout.settings.deadlines, num_devices)

    @property
    def channel(self) -> ReliableChannel:
        """The agent's end of its channel to the controller."""
        return self._machine.channel

    @property
    def clock_s(self) -> float:
        """The time that the node's own clock shows."""
        layout = self.layout
        return layout.clock_offset_s + self.clock_jump_s + layout.clock_rate * self.world.schedule.now_s

    # ---- life -------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Starts the agent, for the first time or after the node or the agent was lost."""
        if self.is_up:
            return
        self.is_up, self.is_leaving, self._is_departing = True, False, False
        self._incarnation = self._machine.incarnation + 1
        self._machine = self._agent()
        self.workers = {}
        self.memories = {}
        self._starting = {}
        self._wake_s = 0.0
        self._proceed()
        self._tick_later()

    def crash(self) -> None:
        """Ends the agent and all its workers, without a message to the controller."""
        self.is_up = False
        for memory in self.memories.values():
            memory.is_lost = True
        for worker in list(self.workers.values()):
            worker.memory.is_lost = True
            worker.die(Cause.SIGNAL, "lost with its node")

    def drain(self) -> None:
        """Drains the node, as after SIGTERM to the agent."""
        if self.is_up:
            self.is_leaving = True
            self._machine.drain("SIGTERM", self.clock_s)
            self._proceed()

    def depart(self) -> None:
        """Ends the grace period of a draining node."""
        if self.is_up:
            self._is_departing = True
            self.world.oracle.drain.node_departs(self.name)
            self._machine.depart("SIGTERM", self.clock_s)
            self.world.schedule.after(DEPART_S, Event(self.name, "leave", (self._incarnation,)))
            self._proceed()

    def close(self, device: int, *, has_failed: bool) -> None:
        """Lets the agent close a device that is sick. If it has failed, the rank there is lost."""
        self.closed.add(device)
        if has_failed:
            tags = {number: worker.tag for number, worker in self.workers.items()}
            self._machine.devices_failed((device,), "Xid 79", tags, self.clock_s)
        else:
            self._machine.close_devices((device,), "row remapping pending")
        self._proceed()

    @property
    def incarnation(self) -> int:
        """The incarnation of its agent. A new one begins after the controller has evicted the node."""
        return self._machine.incarnation

    @property
    def is_read(self) -> bool:
        """Whether a process can read the snapshots in its memory: a live one, or one that can still start there."""
        takes_in = len(self.closed) < self.layout.slots and not self.is_leaving
        return self.is_up and (takes_in or any(worker.is_alive for worker in self.workers.values()))

    def should_be_left(self, device: int) -> None:
        """Makes the oracle check that no rank uses a device that has been sick for long."""
        if self.is_up:
            self.world.oracle.devices.should_be_left(self.name, device)

    # ---- the agent's loop -------------------------------------------------------------------------------------------

    def hear(self, packet: msg.Packet | msg.NodeEvicted) -> None:
        """Receives a packet of the controller."""
        if self.is_up:
            self._machine.receive(packet, self.clock_s)
            self._proceed()

    def reconnected(self) -> None:
        """Handles a new connection to the controller."""
        if self.is_up:
            self._machine.reconnected(self.clock_s)
            self._proceed()

    def worker_says(self, number: int, report: msg.AnyMessage) -> None:
        """Takes a report that a worker writes to its socket. The agent reads it a little later."""
        delay_s = self._durations.local_s
        self.world.schedule.after(delay_s, Event(self.name, "worker_said", (self._machine.incarnation, number, report)))

    def worker_said(self, incarnation: int, number: int, report: msg.AnyMessage) -> None:
        """Reads a worker's report."""
        if self.is_up and incarnation == self._machine.incarnation:
            self._machine.said(number, report, self.clock_s)
            self._proceed()

    def tick(self, incarnation: int) -> None:
        """Polls all workers, at regular intervals."""
        if not self.is_up or incarnation != self._incarnation:
            return
        now_s = self.clock_s
        self._machine.clock_offset_s = self.world.schedule.now_s - now_s  # as computed from the controller's time
        for worker in self.workers.values():
            if worker.is_alive:
                self._machine.observe(worker.number, worker.look(), now_s)
                for phase, began_s, ended_s in worker.take_passed():
                    self._machine.passed(worker.number, phase, began_s, ended_s)
        self._machine.tick(now_s)
        self._proceed()
        self._tick_later()

    def wake(self, due_s: float) -> None:
        """Handles a deadline of the agent."""
        if self.is_up and due_s == self._wake_s:
            self._wake_s = 0.0
            self._machine.tick(self.clock_s)
            self._proceed()

    def _tick_later(self) -> None:
        self.world.schedule.after(self._durations.tick_s, Event(self.name, "tick", (self._incarnation,)))

    def _proceed(self) -> None:
        """Performs the machine's effects, and transmits its packets."""
        for effect in self._machine.take():
            match effect:
                case Spawn():
                    if effect.rank is not None:
                        self.world.oracle.devices.given(self, effect.worker, effect.device)
                    self._starting[effect.worker] = []
                    event = Event(self.name, "spawn", (self._machine.incarnation, effect))
                    self.world.schedule.after(self.world.draw(self._durations.spawn_s), event)
                case Kill():
                    self._kill(effect.worker)
                case HandOver():
                    if isinstance(effect.order, msg.Assign) and effect.order.device is not None:
                        self.world.oracle.devices.given(self, effect.order.worker, effect.order.device)
                    for number in effect.workers:
                        self._hand_over(number, effect.order)
                case LookCloser():
                    counts = {number: self.workers[number].counts() for number in effect.workers}
                    snapshots = {number: self._snapshots_of(number) for number in effect.workers}
                    self._machine.looked_closer(counts, snapshots, {}, self.clock_s)
                case Leave():
                    self.leave(self._incarnation)
                case Signal():
                    for number in effect.workers:
                        self._terminate(number)
                case PassMemory():
                    for keeper in effect.keepers:
                        if (memory := self.memory_of(keeper)) and (steps := memory.steps(effect.rank)):
                            found = msg.InheritSnapshots(effect.worker, effect.rank, str(keeper), steps)
                            self._hand_over(effect.worker, found)
                case ReleaseMemory():
                    for number in tuple(self.memories) if effect.workers is None else effect.workers:
                        if (memory := self.memories.pop(number, None)) is not None:
                            memory.is_lost = effect.workers is None
                case Depart():
                    self.world.oracle.node_began_new_life(self.name)
                    self.world.network.send(self.name, CONTROLLER, effect.message)
        for packet in self._machine.packets(self.clock_s):
            self.world.network.send(self.name, CONTROLLER, packet)
        due_s = self._machine.next_deadline()
        if self.is_up and due_s < (self._wake_s or math.inf):
            self._wake_s = due_s
            delay_s = max(0.0, due_s - self.clock_s) / self.layout.clock_rate + 1e-6
            self.world.schedule.after(delay_s, Event(self.name, "wake", (due_s,)))

    def leave(self, incarnation: int) -> None:
        """Ends the agent and its workers."""
        if not self.is_up or incarnation != self._incarnation:
            return
        for worker in list(self.workers.values()):
            worker.die(Cause.SIGNAL, "killed with the job")
        self.is_up = False

    # ---- processes --------------------------------------------------------------------------------------------------

    def spawn(self, incarnation: int, wanted: Spawn) -> None:
        """Creates a worker's process, and hands it the orders that have arrived meanwhile."""
        if not self.is_up or incarnation != self._machine.incarnation:
            return
        number = wanted.worker
        worker = self.world.add_process(self, wanted)
        self.workers[number] = worker
        for order in self._starting.pop(number):
            self._hand_over(number, order)
        self._machine.spawned(number, worker.process)
        self._proceed()
        worker.world.schedule.after(self.world.draw(self._durations.build_s), Event(f"worker {worker.process}", "go"))

    def _kill(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is not None and worker.is_alive:
            if not self.world.oracle.devices.is_sick(worker):
                self.world.oracle.is_fenced(worker)
            worker.die(Cause.SIGNAL, "killed by SIGKILL")

    def _terminate(self, number: int) -> None:
        """Sends SIGTERM to a worker. Half of the scripts handle it, and the others are killed by it."""
        worker = self.workers.get(number)
        if worker is not None and worker.is_alive and self.world.coin():
            worker.die(Cause.SIGNAL, "killed by SIGTERM")

    def _hand_over(self, number: int, order: msg.WorkerOrder) -> None:
        worker = self.workers.get(number)
        if worker is not None:
            event = Event(f"worker {worker.process}", "order", (order,))
            self.world.schedule.after(self._durations.local_s, event)
        elif number in self._starting:
            self._starting[number].append(order)

    def _snapshots_of(self, number: int) -> msg.SnapshotsByRank:
        """Returns the snapshots in the memory of a worker, also after its end."""
        memory = self.memory_of(number)
        return () if memory is None else memory.by_rank()

    def memory_of(self, number: int) -> SimulatedMemory | None:
        """Returns the memory of a worker, also after its end; None if it has left no snapshots."""
        return self.workers[number].memory if number in self.workers else self.memories.get(number)

    def ended(self, worker: SimulatedProcess) -> None:
        """Schedules the kernel's notification of the end of a process."""
        incarnation = self._machine.incarnation
        delay_s = self.world.draw(self._durations.exit_s)
        if self.world.coin():
            event = Event(self.name, "training_thread_died", (incarnation, worker.number))
            self.world.schedule.after(delay_s * 0.05, event)
        self.world.schedule.after(delay_s, Event(self.name, "exited", (incarnation, worker.number)))

    def training_thread_died(self, incarnation: int, number: int) -> None:
        """Handles the release of a worker's lifeline: the kernel has released its training thread's lock."""
        if self.is_up and incarnation == self._machine.incarnation and number in self.workers:
            snapshots = self._snapshots_of(number)
            self._machine.training_thread_died(number, self.workers[number].tag, self.clock_s, snapshots)
            self._proceed()

    def exited(self, incarnation: int, number: int) -> None:
        """Handles the exit status of a process."""
        if self.is_up and incarnation == self._machine.incarnation:
            snapshots = self._snapshots_of(number)
            worker = self.workers.pop(number)
            self.world.oracle.devices.left(self, number)
            if snapshots:
                self.memories[number] = worker.memory
            cause, detail = worker.exit
            if not detail and not self._is_departing:
                self.world.oracle.drain.ends_well(worker)
            self._machine.exited(number, cause, detail, worker.tag, self.clock_s, snapshots)
            self._proceed()

    def step_completed(self, worker: SimulatedProcess, generation: int, step: int) -> None:
        """Tells the machine that a worker has completed a step. It reports the first one of a generation."""
        self._machine.step_completed(worker.number, generation, step, self.clock_s, 0.1)
        self._proceed()

    def blame(self, number: int, detail: str) -> None:
        """Makes the agent report a healthy worker as lost."""
        worker = self.workers.get(number)
        if self.is_up and worker is not None and worker.is_alive:
            self._machine.broke_protocol(number, detail, worker.tag, self.clock_s)
            self._proceed()

    @property
    def _durations(self) -> SimulatedDurations:
        return self.world.layout.durations
