"""The simulated controller: the real `ControllerMachine`, a journal that survives it, and its crashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.errors import InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import ControllerMachine, JournalEntry
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.scripts.startup import StartUp
from keepstep.protocol.relay.bundle import NodeConnected, NodeSaid, PacketBundle
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.control.relays import PIPE_S, Frame
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.world import World


class SimulatedController:
    """The controller's process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_up = True
        self.life = 0
        """Number of crashes so far."""
        self.machine = ControllerMachine(world.layout.settings)
        self.journal: list[JournalEntry] = []
        """The entries on disk."""
        self._start_up = StartUp()
        self._start_up_file: list[msg.StoreRequested] = []
        """The part of the start-up record that is on disk."""
        self._dies_before: str | None = None
        self._routes: dict[str, int] = {}
        """node -> the relay that holds its connection, as reported by the relays."""
        self._taken: tuple[int, int] | None = None
        """(relay, its life) of the frame that the controller works on."""
        self._wake_s: float | None = None

    def boot(self) -> None:
        """Starts the controller for the first time."""
        self.machine.begin(self.world.schedule.now_s)
        self._wake_later()

    def hear(self, packet: msg.Packet | msg.NodeEvicted | msg.NodeLeft) -> None:
        """Receives a packet of a node, if the controller runs."""
        if self.is_up and isinstance(packet, msg.Packet):
            self.world.oracle.listens(packet)
            self.machine.receive(packet, self.world.schedule.now_s)
            self._proceed()
        elif self.is_up and isinstance(packet, msg.NodeLeft):
            self.machine.left(packet, self.world.schedule.now_s)
            self._proceed()

    def take(self, frame: Frame) -> None:
        """Receives a frame of a relay, even if the relay has died since."""
        if not self.is_up or frame.controller_life != self.life:
            return
        now_s, self._taken = self.world.schedule.now_s, (frame.relay, frame.relay_life)
        for packet in frame.originals:
            if isinstance(packet, msg.Packet):
                self.world.oracle.listens(packet)
        for item in frame.items:
            match item:
                case PacketBundle():
                    refused = self.machine.receive_bundle(item, now_s)
                    assert not refused, refused
                case NodeConnected():
                    self._refuse_former(item.node, frame.relay)
                    self._routes[item.node] = frame.relay
                    self.machine.reconnected(item.node)
                case NodeSaid(_, msg.Packet() as packet):
                    self.machine.receive(packet, now_s)
                case NodeSaid(_, msg.NodeLeft() as message):
                    self.machine.left(message, now_s)
                case NodeSaid():
                    raise InternalError(f"a simulated node sent {item.message}")
        self._proceed()

    def _refuse_former(self, node: str, relay: int) -> None:
        """Orders another relay that still has a connection to this node to end it.

        Either relay's report may be the older one. If the newer connection ends, the node connects once more.
        """
        if (number := self._routes.get(node)) in (None, relay):
            return
        former = self.world.relays.all[number]
        self.world.schedule.after(PIPE_S, Event(former.name, "refuse", (former.life, node)))

    def relay_lost(self, relay: int) -> None:
        """Handles the end of a relay."""
        if self.is_up:
            nodes = [node for node, at in self._routes.items() if at == relay]
            for node in nodes:
                del self._routes[node]
            self.machine.relay_lost(nodes, self.world.schedule.now_s)

    def requested(self, node: str, request: msg.StoreRequested) -> None:
        """Answers a process's request to the start-up record. A value is on disk before its answer is sent."""
        worker = self.machine.job.roster.workers.get(request.worker)
        if not self.is_up or worker is None or worker.node != node:
            return
        answers = self._start_up.request(request, self.machine.job.generation)
        self._start_up_file += self._start_up.take_unwritten()
        for answer in answers:
            self.world.start_up.answers(answer)

    def _settle(self) -> None:
        """Updates the start-up record after every event, as `keepstep.controller.stores.ControllerStores` does."""
        job = self.machine.job
        if self._start_up.starts_over(job.stage, job.generation):
            self._start_up_file.clear()
        for answer in self._start_up.settle(is_complete=job.membership is not None):
            self.world.start_up.answers(answer)

    def drain(self) -> None:
        """Drains the job, as after SIGTERM. A controller that is down gets the signal when it is back."""
        if self.is_up:
            self.machine.drain("SIGTERM", self.world.schedule.now_s)
            self._proceed()
        else:
            self.world.schedule.after(0.5, Event(CONTROLLER, "drain"))

    def reconnected(self, node: str) -> None:
        """Handles a new connection to a node."""
        if self.is_up:
            self.machine.reconnected(node)
            self._proceed()

    def wake(self, due_s: float) -> None:
        """Handles a deadline, unless it was replaced by an earlier one."""
        if self.is_up and due_s == self._wake_s:
            self._wake_s = None
            self.machine.tick(self.world.schedule.now_s)
            self._proceed()

    def _proceed(self) -> None:
        """Writes the journal, and then transmits the orders."""
        entries = self.machine.take_entries()
        if self._dies_before is not None and any(entry.orders for entry in entries):
            if self._dies_before == "transmitting":
                self._write(entries)
            self._dies_before = None
            self.crash()
            return
        self._write(entries)
        self._settle()
        self._transmit()
        self._wake_later()
        if self.machine.job.stage is Stage.ENDED:
            assert self.machine.job.ended is not None
            self.world.job_ended(self.machine.job.ended)

    def _transmit(self) -> None:
        now_s, relays = self.world.schedule.now_s, self.world.relays.all
        if not relays:
            for packet in self.machine.packets(now_s):
                self.world.network.send(CONTROLLER, packet.node, packet)
            return
        alone, bundles = self.machine.bundles(now_s, self._routes)
        sent: dict[int, list[PacketBundle | msg.Packet | msg.NodeEvicted]] = {relay.number: [] for relay in relays}
        for each in alone:
            if (number := self._routes.get(each.node)) is not None:
                sent[number].append(each)
        for number, bundle in bundles:
            sent[number].append(bundle)
        for relay in relays:
            has_taken = self._taken == (relay.number, relay.life)
            if sent[relay.number] or has_taken:
                event = Event(relay.name, "transmit", (relay.life, tuple(sent[relay.number]), has_taken))
                self.world.schedule.after(PIPE_S, event)
        self._taken = None

    def _write(self, entries: list[JournalEntry]) -> None:
        self.journal += entries
        self.world.oracle.written()
        for entry in entries:
            self.world.orders_given(entry)

    def _wake_later(self) -> None:
        due_s = self.machine.next_deadline()
        if due_s is not None and (self._wake_s is None or due_s < self._wake_s):
            self._wake_s = due_s
            self.world.schedule.at(due_s, Event(CONTROLLER, "wake", (due_s,)))

    # ---- faults -----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kills the controller, as SIGKILL does. State that is not on disk is lost, and so is the rendezvous."""
        self.is_up = False
        self.life += 1
        self._wake_s = None
        self.world.oracle.controller_crashed()
        self._routes, self._taken = {}, None
        self.world.relays.end_all()
        self.world.rendezvous.forget()

    def crash_before(self, what: str) -> None:
        """Makes the controller crash at its next orders, before ``journaling`` or before ``transmitting`` them."""
        if self.is_up:
            self._dies_before = what

    def restart(self) -> None:
        """Restarts the controller from its journal, as a supervisor does."""
        self._dies_before = None
        if self.is_up:
            return
        self.is_up = True
        now_s = self.world.schedule.now_s
        self.world.oracle.controller_restarted()
        self.machine = ControllerMachine.from_journal(self.world.layout.settings, self.journal, now_s)
        self._start_up = StartUp(self._start_up_file)
        self.world.relays.start_all()
        self._proceed()
