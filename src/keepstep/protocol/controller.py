"""The outer part of the controller's machine: packets of all nodes in, packets out, leases, and a journal.

Eight events change the decisions of `RecoveryMachine` (`Event`), and each is written to the journal before any
resulting message is sent. The machine is a function of its events, so a restarted controller replays its journal: the
same state, the same orders with the same numbers. Messages that an agent sent after the last entry were never
acknowledged, so it sends them again, and the controller repeats orders that an agent has not received.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import msgspec

from keepstep.errors import InternalError, RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.recovery import Effect, RecoveryMachine, RecoverySettings
from keepstep.protocol.recovery.end.verdicts import too_few_nodes
from keepstep.protocol.relay.bundle import PacketBundle, Row
from keepstep.protocol.reliable_channel import ReliableChannel, Spoken

LEASE_S = 3.0
"""A node not heard of for so long is given up."""
REJOIN_FACTOR = 2.0
"""After a restart the first lease is so many times as long: an agent may need one to find the controller again, and
where no rank holds the state any more because one was slow at that, the job is lost."""
LEASE_CHECK_SHARE = 0.25
"""The controller checks the leases in intervals of this share of one."""
LATE_S = 0.1
"""A look at the leases that comes later than this is put off once, by as much: the controller was held up, and what
nodes have said meanwhile may still wait to be read."""
ISOLATED_S = 60.0
"""A controller that hears no node at all is more likely cut off itself than that all nodes are gone. To give them all
up would lose the state of all, so it waits for so long."""


class ReportsReceived(msgspec.Struct, frozen=True, tag=True):
    """A node's agent said this, in one of its lives."""

    node: str
    incarnation: int
    reports: tuple[Spoken, ...]


class LeaseExpired(msgspec.Struct, frozen=True, tag=True):
    """A node was not heard of for too long, or its agent began a new incarnation. ``heard_s``: when it last was."""

    node: str
    why: str
    heard_s: float


class Departed(msgspec.Struct, frozen=True, tag=True):
    """A node has taken its leave."""

    node: str
    why: str


class DeadlineCame(msgspec.Struct, frozen=True, tag=True):
    """A deadline of the recovery machine has come."""


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """The controller was started again with its journal."""


class CalledOff(msgspec.Struct, frozen=True, tag=True):
    """The launcher wants the job ended."""

    order: msg.EndJob


class DrainAsked(msgspec.Struct, frozen=True, tag=True):
    """The job must end soon, at a step that all ranks have completed."""

    reason: str


class AnswersReceived(msgspec.Struct, frozen=True, tag=True):
    """The agents of several nodes said the same; ``workers`` are, by node, those for which it answers."""

    nodes: tuple[str, ...]
    workers: tuple[tuple[int, ...], ...]
    reports: tuple[msg.GroupAnswer, ...]
    """As in the bundle: without workers."""

    def spoken(self) -> Iterator[msg.GroupAnswer]:
        """The reports, each as one of all workers."""
        workers = tuple(number for numbers in self.workers for number in numbers)
        return (msgspec.structs.replace(each, workers=workers) for each in self.reports)


Event = ReportsReceived | AnswersReceived | LeaseExpired | Departed | DeadlineCame | Restarted | CalledOff | DrainAsked


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal: an event, and for its readers the orders that followed with their reasons."""

    at_s: float
    event: Event
    stage: str = ""
    generation: int = 0
    orders: tuple[tuple[str | None, msg.AgentOrder, str], ...] = ()


def relive(job: RecoveryMachine, event: Event, now_s: float) -> list[Effect]:
    """One event of a job, as its machine lives through it: for the first time, or once more from a journal."""
    match event:
        case ReportsReceived():
            return [effect for report in event.reports for effect in job.receive(event.node, _let_in(report), now_s)]
        case AnswersReceived():
            said = event.nodes, event.workers
            return [effect for report in event.reports for effect in job.answered(*said, report, now_s)]
        case LeaseExpired():
            return job.node_lost(event.node, f"node {event.node} lost: {event.why}", event.heard_s, now_s)
        case Departed():
            return job.node_lost(event.node, f"node {event.node} has left: {event.why}", now_s, now_s, is_fault=False)
        case DeadlineCame():
            return job.tick(now_s)
        case Restarted():
            return job.restarted(now_s)
        case CalledOff():
            return job.called_off(event.order, now_s)
        case DrainAsked():
            return job.drain_asked(event.reason, now_s)
        case _:
            assert_never(event)


def _answers(bundle: PacketBundle, indices: Sequence[int]) -> AnswersReceived:
    """What those nodes of a bundle have said of which it is new."""
    nodes, workers = bundle.nodes, bundle.workers
    if len(indices) < len(nodes):
        nodes, workers = tuple(nodes[each] for each in indices), tuple(workers[each] for each in indices)
    answers = tuple(each for each in bundle.messages if isinstance(each, msg.GroupAnswer))
    if len(answers) < len(bundle.messages):
        raise InternalError(f"a relay has bundled {bundle.messages}, of which not all are answers")
    return AnswersReceived(nodes, workers, answers)


def _let_in(report: Spoken) -> msg.Report:
    assert isinstance(report, msg.Report), f"{report} was let in by `receive`"
    return report


@dataclasses.dataclass(slots=True)
class _NodeConnection:
    """The controller's end of the connection to one node."""

    channel: ReliableChannel
    heard_s: float
    is_silent: bool = False
    """Not heard of since the controller was restarted, so it is not known which orders have arrived there."""
    relay_lost_s: float = 0.0
    """When it last could not be heard because its relay had ended: its lease started over, and yet it was not heard."""

    def patience_s(self, lease_s: float) -> float:
        """How long the node may be silent."""
        return lease_s * (REJOIN_FACTOR if self.is_silent else 1.0)

    def end_s(self, lease_s: float) -> float:
        """When the lease runs out."""
        return max(self.heard_s, self.relay_lost_s) + self.patience_s(lease_s)

    def is_heard(self, lease_s: float, now_s: float) -> bool:
        """Whether something of the node has come within one lease: then the controller is not cut off."""
        return not self.is_silent and now_s < self.heard_s + lease_s


class ControllerMachine:
    """Serves all nodes of one job."""

    def __init__(self, settings: RecoverySettings, lease_s: float | None = LEASE_S) -> None:
        """Args:
        settings: of the job.
        lease_s: how long a node may be silent; None: for ever.
        """
        self.job = RecoveryMachine(settings)
        self._lease_s = lease_s
        self.connections: dict[str, _NodeConnection] = {}
        self._given_up: dict[str, tuple[int, str]] = {}
        """node -> the last incarnation of it that was given up, and why."""
        self._touched: dict[str, None] = {}
        """Nodes for which there may be something to transmit, in order."""
        self._answers: list[msg.Packet | msg.NodeEvicted] = []
        self._entries: list[JournalEntry] = []
        self._check_leases_s: float | None = None
        self._has_put_off = False
        """The next look at the leases is the one that was put off."""
        self._first_node_until_s: float | None = None
        """Until then a first node has to join; None as soon as one has."""
        self._awake_s = 0.0

    # ---- in ---------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """The controller is there. A first node has to join within the start deadline, or the job ends."""
        if not self.connections and not self._given_up:
            self._first_node_until_s = now_s + self.job.settings.start_deadline_s

    def receive(self, packet: msg.Packet, now_s: float) -> None:
        """A packet of a node's agent.

        Raises:
            RemoteProtocolError: something in it is not for that node to send, or was said to a controller of another
                run; nothing of it was heard.
        """
        _check(packet)
        incarnation, why = self._given_up.get(packet.node, (-1, ""))
        connection = self.connections.get(packet.node)
        if connection is not None and packet.incarnation < connection.channel.incarnation:
            why = f"another agent is connected as node {packet.node}; each node needs a unique name"
            self._answers.append(msg.NodeEvicted(packet.node, packet.incarnation, why, is_final=True))
            return
        if packet.incarnation <= incarnation:
            self._answers.append(msg.NodeEvicted(packet.node, packet.incarnation, why, False))
            return
        if (mistake := self._mistaken(packet)) is not None:
            self._answers.append(msg.NodeEvicted(packet.node, packet.incarnation, mistake, is_final=True))
            return
        if connection is not None and packet.incarnation > connection.channel.incarnation:
            self._happened(LeaseExpired(packet.node, "its agent was started again", connection.heard_s), now_s)
            connection = None
        if connection is None:
            if packet.received != 0:
                raise RemoteProtocolError(
                    f"node {packet.node} is in the middle of a run of which this controller's folder holds nothing; "
                    "start the controller with the folder of that run, or restart the agent"
                )
            if packet.first != 0 or not packet.messages:
                # Its first words are still under way, or were lost.
                self._answers.append(msg.Packet(packet.node, packet.incarnation, 0, 0, (), misses=True))
                return
            connection = self._open(packet.node, packet.incarnation, now_s)
        self._discount_own_pause(now_s)
        connection.heard_s, connection.is_silent = now_s, False
        self._touched[packet.node] = None
        reports = connection.channel.receive(packet, now_s)
        if reports:
            self._happened(ReportsReceived(packet.node, packet.incarnation, reports), now_s)

    def receive_bundle(self, bundle: PacketBundle, now_s: float) -> list[tuple[str, str]]:
        """Packets of several nodes that say the same: as `receive` for each of them, but one event for all.

        Returns:
            the nodes that said what was not for them to say, and why; nothing of that was heard.
        """
        self._discount_own_pause(now_s)
        refused: list[tuple[str, str]] = []
        new: list[int] = []
        num_messages, connections, touched = len(bundle.messages), self.connections, self._touched
        rows = zip(bundle.nodes, bundle.incarnations, bundle.firsts, bundle.received, strict=True)
        for index, (node, incarnation, first, received) in enumerate(rows):
            connection = connections.get(node)
            try:
                if connection is None or connection.channel.incarnation != incarnation:
                    self.receive(bundle.packet(index), now_s)
                    continue
                num_skipped = connection.channel.accept(first, received, num_messages, now_s)
            except RemoteProtocolError as error:
                refused.append((node, str(error)))
                continue
            connection.heard_s, connection.is_silent = now_s, False
            if connection.channel.is_due:
                touched[node] = None
            if num_skipped == 0:
                new.append(index)
            elif num_skipped < num_messages:
                reports = bundle.packet(index).messages[num_skipped:]
                self._happened(ReportsReceived(node, incarnation, reports), now_s)
        if new and num_messages:
            self._happened(_answers(bundle, new), now_s)
        return refused

    def relay_lost(self, nodes: Iterable[str], now_s: float) -> None:
        """The relay that held the connections to these nodes has ended: their leases start over, for they connect again
        and could not be heard meanwhile."""
        for connection in filter(None, map(self.connections.get, nodes)):
            connection.relay_lost_s = now_s

    def left(self, message: msg.NodeLeft, now_s: float) -> None:
        """A node takes its leave; it is told that this was heard."""
        connection = self.connections.get(message.node)
        if connection is not None and connection.channel.incarnation == message.incarnation:
            self._happened(Departed(message.node, message.reason), now_s)
        self._answers.append(msg.NodeEvicted(message.node, message.incarnation, message.reason, is_final=True))

    def _mistaken(self, packet: msg.Packet) -> str | None:
        """Why a node that offers itself cannot be meant for this job; None where it can."""
        wanted = self.job.settings.world_size
        for offer in packet.messages:
            if isinstance(offer, msg.NodeJoined) and offer.world_size not in (0, wanted):
                return f"node {packet.node} was started for {offer.world_size} ranks, and this job has {wanted}"
        return None

    def reconnected(self, node: str) -> None:
        """There is a new connection to a node."""
        if node in self.connections:
            self.connections[node].channel.reconnected()
            self._touched[node] = None

    def call_off(self, order: msg.EndJob, now_s: float) -> None:
        """Ends the job from outside."""
        self._happened(CalledOff(order), now_s)

    def drain(self, reason: str, now_s: float) -> None:
        """Has the job end soon, at a step that all ranks have come to. Asked once more it changes nothing."""
        self._happened(DrainAsked(reason), now_s)

    def tick(self, now_s: float) -> None:
        """Acts on leases and deadlines that have come; harmless when none has."""
        self._discount_own_pause(now_s)
        if self._lease_s is not None and self._check_leases_s is not None and now_s >= self._check_leases_s:
            self._has_put_off = now_s > self._check_leases_s + LATE_S and not self._has_put_off
            if self._has_put_off:
                self._check_leases_s = now_s + LATE_S
            else:
                self._check_leases(self._lease_s, now_s)
        if self._first_node_until_s is not None and now_s >= self._first_node_until_s:
            self._first_node_until_s = None
            self.call_off(too_few_nodes(self.job.settings.world_size, 0), now_s)
        due = self.job.next_deadline()
        if due is not None and now_s >= due:
            self._happened(DeadlineCame(), now_s)

    def _discount_own_pause(self, now_s: float) -> None:
        """A controller that was itself held up cannot tell which nodes were silent meanwhile."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if self._lease_s is not None and gap_s > self._lease_s * 2 * LEASE_CHECK_SHARE:
            for connection in self.connections.values():
                connection.heard_s += gap_s
                connection.relay_lost_s += gap_s

    def _check_leases(self, lease_s: float, now_s: float) -> None:
        silent = [node for node, connection in self.connections.items() if now_s >= connection.end_s(lease_s)]
        connections = self.connections.values()
        last_heard_s = max((connection.heard_s for connection in connections), default=now_s)
        hears_none = not any(connection.is_heard(lease_s, now_s) for connection in connections)
        is_isolated = hears_none and now_s < last_heard_s + ISOLATED_S
        for node in [] if is_isolated else silent:
            connection = self.connections[node]
            why = f"no heartbeat for {connection.patience_s(lease_s):g} s"
            self._happened(LeaseExpired(node, why, connection.heard_s), now_s)
        self._schedule_lease_check(lease_s, now_s)

    def _schedule_lease_check(self, lease_s: float, now_s: float) -> None:
        """At the next moment at which a lease may run out, and often enough to notice that it was held up itself."""
        soon_s = now_s + lease_s * LEASE_CHECK_SHARE
        due_s = min((connection.end_s(lease_s) for connection in self.connections.values()), default=now_s)
        self._check_leases_s = (due_s if now_s < due_s < soon_s else soon_s) if self.connections else None

    @property
    def is_heard(self) -> bool:
        """Whether every node has heard all that it was told."""
        return all(connection.channel.is_heard for connection in self.connections.values())

    def next_deadline(self) -> float | None:
        """When `tick` is next due; None while nothing is waited for."""
        dues = (self._check_leases_s, self._first_node_until_s, self.job.next_deadline())
        return min((due for due in dues if due is not None), default=None)

    # ---- out --------------------------------------------------------------------------------------------------------

    def take_entries(self) -> list[JournalEntry]:
        """What must be in the journal before anything of `packets` is transmitted."""
        entries, self._entries = self._entries, []
        return entries

    def packets(self, now_s: float) -> list[msg.Packet | msg.NodeEvicted]:
        """The packets to send now."""
        out: list[msg.Packet | msg.NodeEvicted] = list(self._answers)
        self._answers.clear()
        for node in self._touched:
            connection = self.connections.get(node)
            if connection is not None and not connection.is_silent:
                out += connection.channel.packets(now_s)
        self._touched.clear()
        return out

    def bundles(
        self, now_s: float, routes: Mapping[str, int]
    ) -> tuple[list[msg.Packet | msg.NodeEvicted], list[tuple[int, PacketBundle]]]:
        """The packets to send now, bundled for relays.

        Args:
            now_s: the present time.
            routes: node -> the relay that holds its connection.

        Returns:
            what cannot be bundled, and bundles with their relays. For a node that has no connection there is nothing:
            a new one begins with `reconnected`.
        """
        alone: list[msg.Packet | msg.NodeEvicted] = list(self._answers)
        self._answers.clear()
        same: dict[int, Spoken] = {}
        rows: dict[tuple[int, int], list[Row]] = {}
        for node in self._touched:
            connection = self.connections.get(node)
            if connection is None or connection.is_silent or (relay := routes.get(node)) is None:
                continue
            channel = connection.channel
            if (single := channel.single(now_s)) is None:
                alone += channel.packets(now_s)
                continue
            first, message = single
            same[id(message)] = message
            row = node, channel.incarnation, first, channel.received, ()
            rows.setdefault((relay, id(message)), []).append(row)
        self._touched.clear()
        messages = {which: (message,) for which, message in same.items()}
        return alone, [(relay, PacketBundle.of(found, messages[which])) for (relay, which), found in rows.items()]

    # ---- events -----------------------------------------------------------------------------------------------------

    def _happened(self, event: Event, now_s: float) -> None:
        effects = self._apply(event, now_s)
        orders = tuple((effect.node, effect.order, effect.reason) for effect in effects)
        self._entries.append(JournalEntry(now_s, event, self.job.stage, self.job.generation, orders))

    def _apply(self, event: Event, now_s: float) -> list[Effect]:
        if isinstance(event, LeaseExpired | Departed):
            self._given_up[event.node] = (self.connections.pop(event.node).channel.incarnation, event.why)
        effects = relive(self.job, event, now_s)
        for effect in effects:
            for node in self.connections if effect.node is None else (effect.node,):
                if node in self.connections:
                    self.connections[node].channel.say((effect.order,))
                    self._touched[node] = None
        return effects

    def _open(self, node: str, incarnation: int, now_s: float) -> _NodeConnection:
        connection = self.connections[node] = _NodeConnection(ReliableChannel(node, incarnation), now_s)
        self._first_node_until_s = None
        if self._check_leases_s is None and self._lease_s is not None:
            self._check_leases_s = now_s + self._lease_s * LEASE_CHECK_SHARE
        return connection

    # ---- after a crash ----------------------------------------------------------------------------------------------

    @classmethod
    def from_journal(
        cls, settings: RecoverySettings, entries: Iterable[JournalEntry], now_s: float, lease_s: float | None = LEASE_S
    ) -> ControllerMachine:
        """The controller as its journal left it. Every lease starts over, for no node could renew it meanwhile.

        Args:
            settings: those of the job, as at the first start.
            entries: the journal, oldest first; a torn last line left away.
            now_s: the present time, on the same clock as that of the entries.
            lease_s: as at the first start.
        """
        machine = cls(settings, lease_s)
        heard: dict[str, int] = {}
        for entry in entries:
            event = entry.event
            if isinstance(event, ReportsReceived):
                if event.node not in machine.connections:
                    machine._open(event.node, event.incarnation, entry.at_s)
                    heard[event.node] = 0
                heard[event.node] += len(event.reports)
            elif isinstance(event, AnswersReceived):
                for node in event.nodes:
                    heard[node] += len(event.reports)
            machine._apply(event, entry.at_s)
        for node, connection in machine.connections.items():
            connection.heard_s, connection.is_silent = now_s, True
            connection.channel.resume_at(heard[node])
        machine._awake_s = now_s
        if lease_s is not None:
            machine._schedule_lease_check(lease_s, now_s)
        machine.begin(now_s)
        machine._happened(Restarted(), now_s)
        return machine


def _check(packet: msg.Packet) -> None:
    """Before anything of it counts: a packet is refused as a whole, so that no part of it goes unnoticed."""
    for number, report in enumerate(packet.messages, start=packet.first):
        named = report.node if isinstance(report, msg.NodeReport) else packet.node
        is_report = isinstance(report, msg.Report) and not isinstance(report, msg.StoreRequested)
        if not is_report or named != packet.node or isinstance(report, msg.NodeJoined) != (number == 0):
            raise RemoteProtocolError(
                f"node {packet.node} sent {type(report).__name__} of {named} as message {number}, "
                "which is not for it to send"
            )
