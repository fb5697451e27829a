"""The outer part of the controller's machine: packets of all nodes, leases, and the journal.

Nine kinds of events (`Event`) change the decisions of `RecoveryMachine`. The shell writes each event to the journal
before it sends any resulting message. The machine is a function of its events. So a restarted controller replays its
journal, and has the same state and the same orders with the same numbers. The controller never acknowledged messages
that an agent sent after the last entry, so the agent sends them again. The controller repeats orders that an agent has
not received.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import assert_never

import msgspec

from keepstep.errors import ConfigurationError, InternalError, KeepstepError, RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol.deadlines import LEASE_S
from keepstep.protocol.recovery import Effect, RecoveryMachine, RecoverySettings, Stage
from keepstep.protocol.recovery.end.verdicts import too_few_nodes
from keepstep.protocol.recovery.suspicion import Left
from keepstep.protocol.relay.bundle import PacketBundle, Row
from keepstep.protocol.reliable_channel import ReliableChannel, Spoken

REJOIN_FACTOR = 2.0
"""The first lease after a restart of the controller is longer by this factor: an agent may need a whole lease to find
the controller again, and the job is lost if the evicted nodes held the only copy of the state."""
LEASE_CHECK_SHARE = 0.25
"""The controller checks the leases at intervals of this share of a lease."""
RECENT_SHARE = 0.5
"""The copies on other nodes save the job only if the controller has heard these nodes within this share of a lease. One
switch may cut off several nodes at once, and their leases expire one after the other."""
UNHEARD_S = 1.0
"""If a node was not heard for this long, which is longer than `HEARTBEAT_S` of agents, what it reported may be old."""
UNDECIDED_S = 0.05
"""The controller checks the leases at this interval while it waits to hear other nodes, or which state they hold."""
LATE_S = 0.1
"""If a check of the leases is late by more than this, the controller postpones it once, by the same time: it was
paused, and packets that have arrived meanwhile may still be unread."""


_ISOLATED = (
    "at least half of the nodes are silent, so the cause is probably the network: none is given up before they have "
    "been silent for {:g} s"
)
_KEPT = {
    Left.CHECKPOINT: "only a checkpoint has the state of the ranks there, so it is given up after {:g} s of silence",
    Left.NOTHING: "no other node has the state of the ranks there, so it is given up after {:g} s of silence",
}
"""What is left of the job without a node -> what is said of that node, with the time after which it is given up."""


class ReportsReceived(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The agent of a node has sent reports, in one of its incarnations."""

    node: str
    incarnation: int
    reports: tuple[Spoken, ...]


class LeaseExpired(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A node's lease has expired, or its agent has begun a new incarnation.

    ``heard_s`` is when the controller last heard the node.
    """

    node: str
    why: str
    heard_s: float


class NodeSilent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A node's lease has expired while the job trains, and without its reports it is not known whether other nodes hold
    its state. All ranks stop. The node is evicted when the job loses nothing by that."""

    node: str
    why: str


class Departed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A node has left the job."""

    node: str
    why: str


class DeadlineCame(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A deadline of the recovery machine has come.

    ``silent`` are nodes that the controller has not heard since the suspicions that it judges now.
    """

    silent: tuple[str, ...]


class Restarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The controller was started again with its journal."""


class CalledOff(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The launcher ends the job."""

    order: msg.EndJob


class DrainAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The job must end soon, at a step that all ranks have completed."""

    reason: str


class AnswersReceived(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The agents of several nodes have sent equal reports. ``workers`` are the workers that answered, by node."""

    nodes: tuple[str, ...]
    workers: tuple[tuple[int, ...], ...]
    reports: tuple[msg.GroupAnswer, ...]
    """The reports, with an empty ``workers`` field as in the bundle."""

    def spoken(self) -> Iterator[msg.GroupAnswer]:
        """Returns the reports, each with the workers of all nodes."""
        workers = tuple(number for numbers in self.workers for number in numbers)
        return (msgspec.structs.replace(each, workers=workers) for each in self.reports)


Event = (
    ReportsReceived
    | AnswersReceived
    | LeaseExpired
    | NodeSilent
    | Departed
    | DeadlineCame
    | Restarted
    | CalledOff
    | DrainAsked
)


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of the journal: an event, and the resulting orders (node, order, reason).

    A replay computes the orders again from the event, and compares them (`replay`).
    """

    at_s: float
    event: Event
    stage: str = ""
    generation: int = 0
    orders: tuple[tuple[str | None, msg.AgentOrder, str], ...] = ()


def relive(job: RecoveryMachine, event: Event, now_s: float) -> list[Effect]:
    """Applies an event to a job's machine, for the first time or in a replay of the journal. Returns its orders."""
    match event:
        case ReportsReceived():
            return [effect for report in event.reports for effect in job.receive(event.node, _let_in(report), now_s)]
        case AnswersReceived():
            said = event.nodes, event.workers
            return [effect for report in event.reports for effect in job.answered(*said, report, now_s)]
        case LeaseExpired():
            return job.node_lost(event.node, f"node {event.node} lost: {event.why}", event.heard_s, now_s)
        case NodeSilent():
            return job.node_silent(event.node, event.why, now_s)
        case Departed():
            return job.node_lost(event.node, f"node {event.node} has left: {event.why}", now_s, now_s, is_fault=False)
        case DeadlineCame():
            return job.tick(now_s, event.silent)
        case Restarted():
            return job.restarted(now_s)
        case CalledOff():
            return job.called_off(event.order, now_s)
        case DrainAsked():
            return job.drain_asked(event.reason, now_s)
        case _:
            assert_never(event)


def replay(job: RecoveryMachine, entry: JournalEntry, number: int) -> list[Effect]:
    """Applies an entry of the journal to a job's machine, and returns its orders.

    Reasons are not compared: no agent acts on them.

    Args:
        job: the machine, after the entries before.
        entry: the entry.
        number: its number in the journal, from 1, for the error.

    Raises:
        ConfigurationError: the machine gives other orders than the one that wrote the entry, or comes to another state.
            It is of another version then, and must neither continue the job nor explain it.
    """
    what = f"entry {number} of the journal ({type(entry.event).__name__} at {entry.at_s:.3f} s)"
    try:
        effects = relive(job, entry.event, entry.at_s)
    except (KeepstepError, LookupError, AssertionError) as error:  # in a state that it would not have come to itself
        raise ConfigurationError(f"{what} cannot be replayed: {type(error).__name__}: {error}") from error
    wrote = [(node, order) for node, order, _reason in entry.orders]
    gives = [(effect.node, effect.order) for effect in effects]
    if (wrote, entry.stage, entry.generation) != (gives, job.stage, job.generation):
        pairs = zip_longest(wrote, gives, fillvalue="none")
        others = (f"{one!s:.300}, now {now!s:.300}" for one, now in pairs if one != now)
        raise ConfigurationError(
            f"{what} comes out otherwise than when it was written: the order was {next(others, 'the same')}; stage and "
            f"generation were {entry.stage} and {entry.generation}, now {job.stage} and {job.generation}"
        )
    return effects


def _answers(bundle: PacketBundle, indices: Sequence[int]) -> AnswersReceived:
    """Returns the event for those nodes of a bundle, by index, whose messages are new."""
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
    """Whether the node was silent since the controller restarted. Then it is unknown which orders it has received."""
    silent_since_s: float = 0.0
    """From when its silence counts, if that is later: the node's relay had ended, so the node could not send anything,
    or the controller itself was paused, and could not hear it."""

    def patience_s(self, lease_s: float) -> float:
        """Returns how long the node may be silent."""
        return lease_s * (REJOIN_FACTOR if self.is_silent else 1.0)

    @property
    def lease_from_s(self) -> float:
        """From when the lease counts."""
        return max(self.heard_s, self.silent_since_s)

    def end_s(self, lease_s: float) -> float:
        """Returns when the lease expires."""
        return self.lease_from_s + self.patience_s(lease_s)

    def is_heard(self, lease_s: float, now_s: float) -> bool:
        """Whether the controller has heard the node within one lease, so that its own network works."""
        return not self.is_silent and now_s < self.heard_s + lease_s

    def is_heard_since(self, since_s: float) -> bool:
        """Whether the controller has heard the node since a time."""
        return not self.is_silent and self.heard_s >= since_s


class ControllerMachine:
    """The controller's machine for all nodes of one job. It needs one thread, and reads no clock."""

    def __init__(self, settings: RecoverySettings, lease_s: float | None = LEASE_S) -> None:
        """Args:
        settings: settings of the job.
        lease_s: how long a node may be silent, in seconds; None: forever.
        """
        self.job = RecoveryMachine(settings)
        self._lease_s = lease_s
        self.connections: dict[str, _NodeConnection] = {}
        self._given_up: dict[str, tuple[int, str]] = {}
        """node -> its last incarnation that left or was evicted, and the reason."""
        self._touched: dict[str, None] = {}
        """Nodes for which there may be something to send, in order."""
        self._answers: list[msg.Packet | msg.NodeEvicted] = []
        self._entries: list[JournalEntry] = []
        self._check_leases_s: float | None = None
        self._has_put_off = False
        """Whether the next check of the leases is a postponed one; see `LATE_S`."""
        self._first_node_until_s: float | None = None
        """Time by which a first node must join; None as soon as one has joined."""
        self._awaited_text = ""
        """The sentence about silent nodes that are not given up."""
        self._awake_s = 0.0
        self._hears_from_s = 0.0
        """What comes before this time may have been sent long ago: the controller was paused."""

    # ---- in ---------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """Starts the wait for a first node. If none joins within the start deadline, the job ends."""
        if not self.connections and not self._given_up:
            self._first_node_until_s = now_s + self.job.deadlines.start_s

    def receive(self, packet: msg.Packet, now_s: float) -> None:
        """Processes a packet of a node's agent.

        Raises:
            RemoteProtocolError: the node may not send one of its messages, or the packet is for a controller of another
                run. The machine ignores the whole packet.
        """
        _check(packet)
        self._discount_own_pause(now_s)  # before a lease begins
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
                # The node's first message is still under way, or was lost.
                self._answers.append(msg.Packet(packet.node, packet.incarnation, 0, 0, (), misses=True))
                return
            connection = self._open(packet.node, packet.incarnation, now_s)
        connection.heard_s, connection.is_silent = now_s, False
        self._touched[packet.node] = None
        reports = connection.channel.receive(packet, now_s)
        if reports:
            self._happened(ReportsReceived(packet.node, packet.incarnation, reports), now_s)

    def receive_bundle(self, bundle: PacketBundle, now_s: float) -> list[tuple[str, str]]:
        """Processes packets of several nodes with equal messages: as `receive` for each, but with one event for all.

        Returns:
            (node, error) for each packet that `receive` would refuse. The machine ignores those packets.
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
        """Renews the leases of these nodes, because the relay with their connections has ended.

        They connect again, and could not send anything meanwhile.
        """
        for connection in filter(None, map(self.connections.get, nodes)):
            connection.silent_since_s = now_s

    def left(self, message: msg.NodeLeft, now_s: float) -> None:
        """Removes a node that leaves the job. The answer is a final `NodeEvicted`."""
        connection = self.connections.get(message.node)
        if connection is not None and connection.channel.incarnation == message.incarnation:
            self._happened(Departed(message.node, message.reason), now_s)
        self._answers.append(msg.NodeEvicted(message.node, message.incarnation, message.reason, is_final=True))

    def _mistaken(self, packet: msg.Packet) -> str | None:
        """Returns why a joining node cannot belong to this job; None if it can."""
        wanted = self.job.settings.world_size
        for offer in packet.messages:
            if isinstance(offer, msg.NodeJoined) and offer.world_size not in (0, wanted):
                return f"node {packet.node} was started for {offer.world_size} ranks, and this job has {wanted}"
        return None

    def reconnected(self, node: str) -> None:
        """Records a new connection to a node. `packets` repeats the messages that the node has not acknowledged."""
        if node in self.connections:
            self.connections[node].channel.reconnected()
            self._touched[node] = None

    def call_off(self, order: msg.EndJob, now_s: float) -> None:
        """Ends the job with the launcher's order."""
        self._happened(CalledOff(order), now_s)

    def drain(self, reason: str, now_s: float) -> None:
        """Begins a drain: the job ends soon, at a step that all ranks have completed. A second call has no effect."""
        self._happened(DrainAsked(reason), now_s)

    def tick(self, now_s: float) -> None:
        """Acts on expired leases and deadlines. Does nothing if there are none."""
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
            since_s = self.job.judges_since(now_s)
            silent = () if since_s is None else self._not_heard_since(since_s)
            standstill = self.job.standstill
            if self._lease_s is not None:
                unheard = self._not_heard_since(now_s - UNHEARD_S)
                standstill.silent_nodes = {node: self.connections[node].heard_s for node in unheard}
            self._happened(DeadlineCame(tuple(silent)), now_s)
            standstill.silent_nodes = {}

    def _not_heard_since(self, since_s: float) -> list[str]:
        since_s = max(since_s, self._hears_from_s)
        return [node for node, each in self.connections.items() if not each.is_heard_since(since_s)]

    def _discount_own_pause(self, now_s: float) -> None:
        """Extends all leases by the time in which the controller itself was paused, and could not hear any node."""
        gap_s, self._awake_s = now_s - self._awake_s, now_s
        if self._lease_s is not None and gap_s > self._lease_s * 2 * LEASE_CHECK_SHARE:
            self._hears_from_s = now_s + LATE_S
            for connection in self.connections.values():
                connection.silent_since_s = connection.lease_from_s + gap_s

    def _check_leases(self, lease_s: float, now_s: float) -> None:
        silent = [node for node, connection in self.connections.items() if now_s >= connection.end_s(lease_s)]
        unheard = [connection for connection in self.connections.values() if not connection.is_heard(lease_s, now_s)]
        # If half of them fall silent together, or all, the cause is hardly in each: it may be the controller's network.
        are_many = len(unheard) >= max(2, len(self.connections) / 2) or len(unheard) == len(self.connections)
        last_heard_s = max((connection.heard_s for connection in unheard), default=now_s)
        is_isolated = are_many and now_s < last_heard_s + self.job.deadlines.isolated_s
        is_undecided = False
        deadlines = self.job.deadlines
        least_s = {Left.MEMORY: 0.0, Left.CHECKPOINT: deadlines.isolated_s, Left.NOTHING: deadlines.long_s}
        doubted = {*silent, *self._not_heard_since(now_s - lease_s * RECENT_SHARE)} if silent else set()
        awaited: dict[str, list[str]] = {}
        if is_isolated and silent:
            awaited = {_ISOLATED.format(deadlines.isolated_s): silent}
        for node in [] if is_isolated else silent:
            connection = self.connections[node]
            why = f"no heartbeat for {connection.patience_s(lease_s):g} s"
            left = self.job.left_without_node(node, doubted)
            if left is not Left.MEMORY and len(doubted) > len(silent):
                is_undecided = True  # each of these is heard soon, or its lease expires
            elif left is None:
                is_undecided = True
                if self.job.stage is Stage.TRAINING:
                    self._happened(NodeSilent(node, why), now_s)
            elif now_s >= connection.lease_from_s + least_s[left]:
                self._happened(LeaseExpired(node, why, connection.heard_s), now_s)
            else:
                awaited.setdefault(_KEPT[left].format(least_s[left]), []).append(node)
        self._tell_of_awaited(awaited)
        self._schedule_lease_check(lease_s, now_s)
        if is_undecided:
            self._check_leases_s = now_s + UNDECIDED_S

    def _tell_of_awaited(self, awaited: Mapping[str, list[str]]) -> None:
        """Publishes which silent nodes are not given up, by the reason, when these change. No decision depends on it.

        The view of a run's folder does not show it, for the journal has no event without a decision.
        """
        standstill, before = self.job.standstill, self._awaited_text
        parts = [f"no heartbeat from {', '.join(sorted(nodes))}; {why}" for why, nodes in awaited.items()]
        self._awaited_text = ". ".join(parts)
        if before and not parts:
            standstill.no_longer(before)
        elif self._awaited_text != before:
            standstill.announce(self._awaited_text)

    def _schedule_lease_check(self, lease_s: float, now_s: float) -> None:
        """Schedules the next check: when a lease may expire, and often enough to notice the controller's own pauses."""
        soon_s = now_s + lease_s * LEASE_CHECK_SHARE
        due_s = min((connection.end_s(lease_s) for connection in self.connections.values()), default=now_s)
        self._check_leases_s = (due_s if now_s < due_s < soon_s else soon_s) if self.connections else None

    @property
    def is_heard(self) -> bool:
        """Whether every node has acknowledged all messages."""
        return all(connection.channel.is_heard for connection in self.connections.values())

    def next_deadline(self) -> float | None:
        """Returns when `tick` is next due; None if there is no deadline."""
        dues = (self._check_leases_s, self._first_node_until_s, self.job.next_deadline())
        return min((due for due in dues if due is not None), default=None)

    # ---- out --------------------------------------------------------------------------------------------------------

    def take_entries(self) -> list[JournalEntry]:
        """Returns the new journal entries. The caller must write them before it sends anything of `packets`."""
        entries, self._entries = self._entries, []
        return entries

    def packets(self, now_s: float) -> list[msg.Packet | msg.NodeEvicted]:
        """Returns the packets to send now."""
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
        """Returns the packets to send now, bundled for relays.

        Args:
            now_s: the present time.
            routes: node -> the number of the relay that holds its connection.

        Returns:
            packets that cannot be bundled, and (relay, bundle) pairs. The result has nothing for a node without a
            connection: its messages are sent after the next `reconnected`.
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
        effects = relive(self.job, event, now_s)
        self._say(event, effects)
        orders = tuple((effect.node, effect.order, effect.reason) for effect in effects)
        self._entries.append(JournalEntry(now_s, event, self.job.stage, self.job.generation, orders))

    def _say(self, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, LeaseExpired | Departed):
            self._given_up[event.node] = (self.connections.pop(event.node).channel.incarnation, event.why)
        for effect in effects:
            for node in self.connections if effect.node is None else (effect.node,):
                if node in self.connections:
                    self.connections[node].channel.say((effect.order,))
                    self._touched[node] = None

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
        """Builds the machine from a journal. Every lease starts over, because no node could renew it meanwhile.

        Args:
            settings: settings of the job, the same as at the first start.
            entries: the journal, oldest first, without an incomplete last line.
            now_s: the present time, on the clock of the entries.
            lease_s: the same as at the first start.

        Raises:
            ConfigurationError: this machine gives other orders than the one that wrote the journal, and that the agents
                have received.
        """
        machine = cls(settings, lease_s)
        heard: dict[str, int] = {}
        for number, entry in enumerate(entries, start=1):
            event, effects = entry.event, replay(machine.job, entry, number)
            if isinstance(event, ReportsReceived):
                if event.node not in machine.connections:
                    machine._open(event.node, event.incarnation, entry.at_s)
                    heard[event.node] = 0
                heard[event.node] += len(event.reports)
            elif isinstance(event, AnswersReceived):
                for node in event.nodes:
                    heard[node] += len(event.reports)
            machine._say(event, effects)
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
    """Raises `RemoteProtocolError` if the node may not send one of the messages. So a packet is refused as a whole."""
    for number, report in enumerate(packet.messages, start=packet.first):
        named = report.node if isinstance(report, msg.NodeReport) else packet.node
        is_report = isinstance(report, msg.Report) and not isinstance(report, msg.StoreRequested)
        if not is_report or named != packet.node or isinstance(report, msg.NodeJoined) != (number == 0):
            raise RemoteProtocolError(
                f"node {packet.node} sent {type(report).__name__} of {named} as message {number}, "
                "which is not for it to send"
            )
