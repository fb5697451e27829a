"""Cost of one recovery for the controller, by world size: real machines of agents and controller, in virtual time.

The controller is one server: while it works on a packet the next ones wait. Its processor time is measured, including
decoding and encoding, and added to the virtual time, so queues become visible. Everything else is the same at every
world size: the network, and the times of ranks to reach safe points, to connect and to restore (without bytes).

    python benchmarks/scale.py --devices 16384 --nodes-per-relay 256
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import heapq
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from keepstep.errors import ConfigurationError, InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.effects import HandOver, Spawn
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoverySettings, Stage
from keepstep.protocol.relay.bundle import NodeSaid, PacketBundle
from keepstep.protocol.relay.gathering import Gathering
from keepstep.transports import codec
from keepstep.transports.relay import wire

DEVICES_PER_NODE = 8
SIZES = (8, 64, 512, 4096, 16_384, 65_536, 100_000)
STEP = 1000
"""The step in which a rank is lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumptions:
    """Times in seconds that do not depend on the world size. Groups are assumed to connect in constant time."""

    network_s: tuple[float, float] = (0.0001, 0.0005)
    """One-way latency between controller and agent, within one site."""
    exit_s: float = 0.0001
    """Time from the death of a rank until its agent knows, by the lifeline. Measured."""
    stop_s: tuple[float, float] = (0.0, 0.015)
    """Time from `Stop` to the safe point: at most the distance of two stop points in a pass of one second."""
    connect_s: tuple[float, float] = (0.008, 0.020)
    restore_s: tuple[float, float] = (0.010, 0.030)
    """Time of a transfer without its bytes."""
    step_s: float = 1.0
    pipe_s: float = 0.00005
    """One-way latency between controller and relay, on one host."""
    call_s: float = 0.0
    """Processor time of gRPC for a message, for each process that receives or sends it over the network."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One recovery at one world size. Times are in seconds of virtual time, except those with ``cpu``."""

    devices: int
    detect_s: float
    stop_s: float
    reset_s: float
    restore_s: float
    decide_cpu_s: float
    cpu_s: float
    """The controller's processor time for the whole recovery."""
    num_packets: int
    """Number of packets that the controller received."""

    @property
    def stop_to_resume_s(self) -> float:
        """Time from the controller's knowledge of the loss until every rank is at the resume step."""
        return self.stop_s + self.reset_s + self.restore_s


@contextlib.contextmanager
def shared_memberships() -> Iterator[None]:
    """Lets all agents, which are in this process, share equal memberships."""
    made: dict[tuple[int, int], tuple[object, object, msg.Membership]] = {}
    right = msg.Membership.changed

    def changed(self: msg.Membership, change: msg.MembershipChange) -> msg.Membership:
        key = id(self), id(change)
        if key not in made:
            made[key] = self, change, right(self, change)
        return made[key][-1]

    msg.Membership.changed = changed  # type: ignore[method-assign]  # nothing else runs here
    try:
        yield
    finally:
        msg.Membership.changed = right  # type: ignore[method-assign]  # as it was


class Server:
    """A process that does one thing at a time. Its measured processor time is added to the virtual time."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.cpu_s = 0.0

    @contextlib.contextmanager
    def working(self, now_s: float) -> Iterator[float]:
        """Measures a piece of work in its ``with`` block. Yields the time at which it begins."""
        begin_s, began = max(now_s, self.busy_until_s), time.thread_time()
        yield begin_s
        self.spend(begin_s, time.thread_time() - began)

    def spend(self, begin_s: float, cpu_s: float) -> None:
        """Marks the server as busy for ``cpu_s``."""
        self.busy_until_s = max(begin_s, self.busy_until_s) + cpu_s
        self.cpu_s += cpu_s


class Relay(Server):
    """One relay, with its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.gathering = Gathering()


class Cluster:
    """One job, in which a rank is lost."""

    def __init__(self, devices: int, assumptions: Assumptions, nodes_per_relay: int = 0, seed: int = 0) -> None:
        self._assumed = assumptions
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._entries: list[tuple[float, int, str, str, object]] = []
        self._number = 0
        self._wakes_s: dict[str, float] = {}
        self._server = Server()
        """The controller."""
        self._journal = msgspec.json.Encoder()
        self.decide_cpu_s = 0.0
        self.num_packets = 0
        per_node = min(devices, DEVICES_PER_NODE)
        num_nodes = -(-devices // per_node)
        self.controller = ControllerMachine(RecoverySettings(num_nodes * per_node, 1, per_node), lease_s=None)
        self.agents = {
            f"node-{number}": AgentMachine(
                msg.NodeJoined(f"node-{number}", per_node + (number == 0), "site", 0, 0, (), 0), 1, Deadlines()
            )
            for number in range(num_nodes)
        }
        num_relays = -(-num_nodes // nodes_per_relay) if nodes_per_relay else 0
        self._relays = [Relay() for _ in range(num_relays)]
        self._routes = {node: number % num_relays for number, node in enumerate(self.agents)} if num_relays else {}
        self._inbox: list[tuple[int, bytes]] = []
        """Frames of relays that wait for the controller."""

    def lose_a_rank(self) -> Row:
        """Starts the job, kills a rank, and returns the costs of the recovery."""
        job = self.controller.job
        for node in self.agents:
            self._transmit(node)
        self._run_until(lambda: job.stage is Stage.TRAINING and any(spare.ready for spare in job.roster.spares()))
        lost_s = (
            max(each.busy_until_s for each in (self._server, *self._relays)) + 1.0
        )  # when the queue of the start-up is empty
        self._run_until(lambda: self._now_s >= lost_s)
        # The agents are in this process, too: the controller's time would include their garbage collection.
        gc.freeze()
        gc.disable()
        self._server.cpu_s, self.num_packets, lost_s = 0.0, 0, self._now_s
        victim = max(job.roster.holders(), key=lambda worker: worker.worker)
        self._later(self._assumed.exit_s, "exited", victim.node, victim.worker)
        self._run_until(lambda: bool(job.records) and job.stage is Stage.TRAINING)
        (record,) = job.records
        marks = (lost_s, record.begun_s, record.decided_s, record.reset_s, record.restored_s)
        begun, stopped, reset, restored = _parts(marks)
        return Row(
            job.settings.world_size,
            begun,
            stopped,
            reset,
            restored,
            self.decide_cpu_s,
            self._server.cpu_s,
            self.num_packets,
        )

    # ---- events -----------------------------------------------------------------------------------------------------

    def _later(self, delay_s: float, what: str, node: str, content: object) -> None:
        self._number += 1
        heapq.heappush(self._entries, (self._now_s + delay_s, self._number, what, node, content))

    def _run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._entries:
                raise InternalError(f"the simulated job stands still in stage {self.controller.job.stage}")
            self._now_s, _, what, node, content = heapq.heappop(self._entries)
            match what, content:
                case "to controller", bytes():
                    self._serve(content)
                case "to relay", bytes():
                    self._relay_gathers(self._routes[node], content)
                case "relay sends", int():
                    self._relay_sends(content)
                case "frame", (int() as number, bytes() as frame):
                    self._inbox.append((number, frame))
                    self._later(max(0.0, self._server.busy_until_s - self._now_s), "turn", node, None)
                case "turn", _:
                    self._take_turn()
                case "down", (int() as number, bytes() as frame):
                    self._relay_transmits(number, frame)
                case _:
                    self._agent_acts(what, node, content)
                    self._transmit(node)

    def _serve(self, frame: bytes) -> None:
        """Lets the controller handle one packet, after the earlier ones."""
        before, cpu_s = self.controller.job.stage, self._server.cpu_s
        with self._server.working(self._now_s) as begin_s:
            packet = codec.decode(frame)
            assert isinstance(packet, msg.Packet)
            self.controller.receive(packet, begin_s)
            self._write_journal()
            answers = [(answer.node, codec.encode(answer)) for answer in self.controller.packets(begin_s)]
        self._server.spend(0.0, self._assumed.call_s * (1 + len(answers)))
        self.num_packets += 1
        self._note_decision(before, cpu_s)
        for node, answer in answers:
            delay_s = self._server.busy_until_s - self._now_s + self._drawn(self._assumed.network_s)
            self._later(delay_s, "packet", node, answer)

    def _write_journal(self) -> None:
        for entry in self.controller.take_entries():
            self._journal.encode(entry)

    def _note_decision(self, before: Stage, cpu_s: float) -> None:
        if before is Stage.STOPPING and self.controller.job.stage is Stage.RECOVERING:
            self.decide_cpu_s = self._server.cpu_s - cpu_s

    # ---- with relays ------------------------------------------------------------------------------------------------

    def _relay_gathers(self, number: int, frame: bytes) -> None:
        """Lets a relay read a packet, after its earlier work."""
        relay = self._relays[number]
        with relay.working(self._now_s):
            packet = codec.decode(frame)
            assert isinstance(packet, msg.Packet)
            relay.gathering.add(NodeSaid(packet.node, packet))
        relay.spend(0.0, self._assumed.call_s)
        self._later(relay.busy_until_s - self._now_s, "relay sends", "", number)

    def _relay_sends(self, number: int) -> None:
        relay = self._relays[number]
        if self._now_s < relay.busy_until_s - 1e-9:  # it first reads the packets that have arrived
            return
        with relay.working(self._now_s):
            items = relay.gathering.take()
            frame = wire.encode(wire.Upward(items)) if items else None
        if frame is not None:
            self._later(relay.busy_until_s - self._now_s + self._assumed.pipe_s, "frame", "", (number, frame))

    def _take_turn(self) -> None:
        """Lets the controller handle all waiting frames of its relays."""
        if not self._inbox or self._now_s < self._server.busy_until_s - 1e-9:
            return
        before, cpu_s = self.controller.job.stage, self._server.cpu_s
        with self._server.working(self._now_s) as begin_s:
            frames, self._inbox = self._inbox, []
            for _, frame in frames:
                for item in wire.decode_upward(frame).items:
                    if isinstance(item, PacketBundle):
                        self.num_packets += len(item.nodes)
                        self.controller.receive_bundle(item, begin_s)
                    elif isinstance(item, NodeSaid):
                        assert isinstance(item.message, msg.Packet)
                        self.num_packets += 1
                        self.controller.receive(item.message, begin_s)
            self._write_journal()
            answers = self._answers({number for number, _ in frames}, begin_s)
        self._note_decision(before, cpu_s)
        for number, answer in answers:
            delay_s = self._server.busy_until_s - self._now_s + self._assumed.pipe_s
            self._later(delay_s, "down", "", (number, answer))

    def _answers(self, taken: set[int], now_s: float) -> list[tuple[int, bytes]]:
        """Returns a frame for each relay that waits for one, or has packets to transmit."""
        alone, bundles = self.controller.bundles(now_s, self._routes)
        others: dict[int, list[NodeSaid]] = defaultdict(list)
        for packet in alone:
            others[self._routes[packet.node]].append(NodeSaid(packet.node, packet))
        encoded: dict[int, list[wire.EncodedBundle]] = defaultdict(list)
        for (number, _), bundle in zip(bundles, wire.encoded_bundles(each for _, each in bundles), strict=True):
            encoded[number].append(bundle)
        numbers = sorted(taken | encoded.keys() | others.keys())
        frames = (
            wire.Downward(number in taken, tuple(encoded[number]), tuple(others[number]), refused=(), publishing=())
            for number in numbers
        )
        return [(number, wire.encode(frame)) for number, frame in zip(numbers, frames, strict=True)]

    def _relay_transmits(self, number: int, data: bytes) -> None:
        """Lets a relay turn a frame of the controller into packets, after its earlier work."""
        relay = self._relays[number]
        with relay.working(self._now_s):
            frame = wire.decode_downward(data)
            if frame.has_taken:
                relay.gathering.taken()
        for said in frame.others:
            with relay.working(self._now_s):
                codec.encode(said.message)
            self._transmitted(relay, said.node, said.message)
        for bundle in frame.bundles:
            rows = zip(bundle.incarnations, bundle.firsts, bundle.received, strict=True)
            packets = bundle.packets()
            messages: tuple[msg.Report | msg.AgentOrder, ...] = ()
            for index, numbers in enumerate(rows):
                with relay.working(self._now_s):
                    node, packet = next(packets)
                if index == 0:  # all agents are in this process: they share one copy of an equal order
                    first_one = codec.decode(packet)
                    assert isinstance(first_one, msg.Packet)
                    messages = first_one.messages
                self._transmitted(relay, node, msg.Packet(node, *numbers, messages, misses=False))
        self._later(max(0.0, relay.busy_until_s - self._now_s), "relay sends", "", number)

    def _transmitted(self, relay: Relay, node: str, packet: msg.AnyMessage) -> None:
        relay.spend(0.0, self._assumed.call_s)
        self._later(relay.busy_until_s - self._now_s + self._drawn(self._assumed.network_s), "packet", node, packet)

    # ---- the nodes --------------------------------------------------------------------------------------------------

    def _agent_acts(self, what: str, node: str, content: object) -> None:
        agent = self.agents[node]
        match content:
            case bytes() | msg.Packet() | msg.NodeEvicted():
                packet = codec.decode(content) if isinstance(content, bytes) else content
                assert isinstance(packet, msg.Packet | msg.NodeEvicted)
                agent.receive(packet, self._now_s)
            case int() if what == "exited":
                tag = Tag(1, STEP, Phase.BACKWARD)
                agent.exited(content, Cause.SIGNAL, "killed by SIGKILL", tag, self._now_s)
            case tuple():
                number, report = content
                agent.said(number, report, self._now_s)
            case _:
                self._wakes_s.pop(node, None)
                agent.tick(self._now_s)
        for effect in agent.take():
            if isinstance(effect, Spawn):
                agent.spawned(effect.worker, 1000 + effect.worker)
                self._worker_says(node, effect.worker, 0.0, msg.WorkerJoined(effect.worker, 1000 + effect.worker))
                if effect.rank is None:
                    self._worker_says(node, effect.worker, 0.1, _ready(effect.worker, 0, ()))
            elif isinstance(effect, HandOver):
                for number in effect.workers:
                    self._worker_obeys(node, number, effect.order)

    def _worker_obeys(self, node: str, number: int, order: msg.WorkerOrder) -> None:
        """Simulates how a healthy rank obeys an order, and how long it takes."""
        assumed = self._assumed
        match order:
            case msg.Assign() if order.generation == 1:
                self._worker_says(node, number, 0.01, msg.GroupsReset((number,), 1))
                self._worker_says(node, number, 0.5, _ready(number, 1, (0,)))
            case msg.Stop():
                report = msg.SafePointReached(
                    (number,), order.generation, STEP, Phase.BACKWARD, (STEP,), STEP, (), False, (), None, None
                )
                self._worker_says(node, number, self._drawn(assumed.stop_s), report)
            case msg.Recover():
                connected_s = self._drawn(assumed.connect_s)
                if order.generation > 1:
                    self._worker_says(node, number, connected_s, msg.GroupsReset((number,), order.generation))
                recovered_s = connected_s + self._drawn(assumed.restore_s)
                self._worker_says(node, number, recovered_s, msg.StateRecovered((number,), order.generation, 0, False))
            case _:
                pass

    def _worker_says(self, node: str, number: int, delay_s: float, report: msg.WorkerReport) -> None:
        self._later(delay_s, "said", node, (number, report))

    def _transmit(self, node: str) -> None:
        agent = self.agents[node]
        for packet in agent.packets(self._now_s):
            to = "to relay" if self._relays else "to controller"
            self._later(self._drawn(self._assumed.network_s), to, node, codec.encode(packet))
        due_s = agent.next_deadline()
        if due_s < self._wakes_s.get(node, math.inf):
            self._wakes_s[node] = due_s
            self._later(max(0.0, due_s - self._now_s) + 1e-6, "wake", node, None)

    def _drawn(self, span_s: tuple[float, float]) -> float:
        return self._random.uniform(*span_s)


def _ready(worker: int, generation: int, reach: tuple[int, ...]) -> msg.WorkerReady:
    return msg.WorkerReady(worker, generation, reach, (), False, False, "0", 0.0)


def _parts(marks: Sequence[float | None]) -> list[float]:
    """Returns the times between the moments of a completed recovery."""
    moments = [mark for mark in marks if mark is not None]
    return [late - early for early, late in itertools.pairwise(moments)]


def measure(devices: int, assumptions: Assumptions | None = None, nodes_per_relay: int = 0) -> list[Row]:
    """Returns one row for each world size up to ``devices``."""
    sizes = [size for size in SIZES if size < devices] + [devices]
    try:
        return [_row(size, assumptions or Assumptions(), nodes_per_relay) for size in sizes]
    finally:
        gc.unfreeze()
        gc.enable()


def _row(devices: int, assumptions: Assumptions, nodes_per_relay: int) -> Row:
    with shared_memberships():
        return Cluster(devices, assumptions, nodes_per_relay).lose_a_rank()


def report(console: Console, devices: int, assumptions: Assumptions | None = None, nodes_per_relay: int = 0) -> None:
    """Prints the table and the ratios.

    Raises:
        ConfigurationError: too few devices.
    """
    if devices < 2:
        raise ConfigurationError(f"--devices {devices}: allowed are 2 and more")
    rows = measure(devices, assumptions, nodes_per_relay)
    table = Table(
        box=None, title="One lost rank: milliseconds of virtual time by part, and the controller's own processor time"
    )
    heads = ("devices", "detect", "stop", "reset", "restore", "stop..resume", "decide CPU", "CPU", "packets")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        parts = (
            row.detect_s,
            row.stop_s,
            row.reset_s,
            row.restore_s,
            row.stop_to_resume_s,
            row.decide_cpu_s,
            row.cpu_s,
        )
        table.add_row(f"{row.devices:,}", *(f"{part * 1e3:,.1f}" for part in parts), f"{row.num_packets:,}")
    console.print(table)
    console.print(_what_grows(rows), highlight=False)


def _what_grows(rows: list[Row]) -> str:
    """Returns a summary of the costs that grow with the world size."""
    last = rows[-1]
    lines = [
        f"The decision takes {last.decide_cpu_s:.3f} s of processor time at {last.devices:,} devices.",
        f"The controller spends {last.cpu_s / last.num_packets * 1e6:.0f} us on a packet, of which every node sends "
        "one per part: that, and the size of the decision, are what grows with the world. Orders to all ranks are one "
        "message, the same for every node, and answers come once per node.",
    ]
    between = {row.devices: row.stop_to_resume_s for row in rows}
    if 64 in between and 16_384 in between:
        lines.append(f"Stop to resume at 16,384 devices is {between[16_384] / between[64]:.2f} times that at 64.")
    return "\n".join(lines)


def main() -> None:
    """Prints the table for the world sizes that the command line asks for."""
    parser = argparse.ArgumentParser(description="The controller's cost of one recovery by world size.")
    parser.add_argument(
        "--devices", type=int, default=512, metavar="N", help="the largest world (default: %(default)s)"
    )
    parser.add_argument(
        "--nodes-per-relay", type=int, default=0, metavar="N", help="0: no relays (default: %(default)s)"
    )
    parser.add_argument(
        "--call-us", type=float, default=0.0, help="what gRPC takes for a message, in us (default: %(default)s)"
    )
    chosen = parser.parse_args()
    assumptions = Assumptions(call_s=chosen.call_us / 1e6)
    try:
        report(Console(soft_wrap=True), chosen.devices, assumptions, chosen.nodes_per_relay)
    except ConfigurationError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
