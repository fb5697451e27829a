"""A controller's machine, agents' machines and workers that do at once what they are told, in one process.

For tests of what lies between controller and agents: packets, leases, incarnations, the journal. How workers train and
what they can reach is the business of other tests; here a worker stands between two steps, always.
"""

from __future__ import annotations

import dataclasses

import msgspec

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import LATE_S, ControllerMachine, JournalEntry
from keepstep.protocol.deadlines import LEASE_S, Deadlines
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.node.agent import AgentMachine
from keepstep.protocol.node.effects import Depart, HandOver, Kill, Leave, Spawn
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoverySettings
from keepstep.protocol.relay.bundle import NodeSaid, PacketBundle
from keepstep.protocol.relay.gathering import Gathering

MOMENT_S = 0.001
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournalEntry)


class Crashed(Exception):
    """The controller is gone: the journal has the entry at which it was to end, and nothing was transmitted since."""


@dataclasses.dataclass
class ToyWorker:
    """One process: the step at which its parameters are, None while it has none of the job's."""

    number: int
    rank: int | None
    step: int | None = None


class ToyNode:
    """An agent's machine and its workers."""

    def __init__(self, name: str, slots: int, incarnation: int) -> None:
        self.name = name
        self.agent = AgentMachine(msg.NodeJoined(name, slots, name, 0, 0, (), 0), incarnation, Deadlines())
        self.workers: dict[int, ToyWorker] = {}
        self.orders: list[msg.AgentOrder] = []
        """What has arrived here, each order once; not those for the agent itself."""
        self.has_left = False
        self.departing: list[msg.NodeLeft] = []
        """What the agent says when it takes its leave."""
        self.is_cut_off = False
        """Nothing gets through to the controller, nor from it."""

    def perform(self, now_s: float) -> None:
        """Does what the machine wants done, and what the workers do upon it, until all is done."""
        while effects := self.agent.take():
            for effect in effects:
                match effect:
                    case Spawn():
                        self._start(effect, now_s)
                    case Kill():
                        self.exit(effect.worker, "killed by SIGKILL", now_s)
                    case HandOver():
                        self.orders.append(effect.order)
                        for number in effect.workers:
                            self._obey(self.workers[number], effect.order, now_s)
                    case Leave():
                        self.has_left = True
                    case Depart():
                        self.departing.append(effect.message)

    def exit(self, number: int, detail: str, now_s: float) -> None:
        """A worker's process ends."""
        if self.workers.pop(number, None) is not None:
            cause = Cause.SIGNAL if detail else Cause.EXIT
            self.agent.exited(number, cause, detail, Tag(1, 0, Phase.UPDATED), now_s)

    def _start(self, effect: Spawn, now_s: float) -> None:
        self.workers[effect.worker] = ToyWorker(effect.worker, effect.rank)
        self.agent.spawned(effect.worker, 4000 + effect.worker)
        self.agent.said(effect.worker, msg.WorkerJoined(effect.worker, 4000 + effect.worker), now_s)
        if effect.rank is None:
            self._say(msg.WorkerReady(effect.worker, 0, (), (), False, False, "0", 0.0), now_s)

    def _obey(self, worker: ToyWorker, order: msg.WorkerOrder, now_s: float) -> None:
        me = (worker.number,)
        match order:
            case msg.Assign() if worker.rank is not None:
                worker.step = 0
                self._say(msg.GroupsReset(me, order.generation), now_s)
                self._say(msg.WorkerReady(worker.number, order.generation, (0,), (), False, False, "0", 0.0), now_s)
            case msg.Assign():
                worker.rank = order.rank
            case msg.Stop():
                reach = () if worker.step is None else (worker.step,)
                at = (worker.step or 0) - 1
                self._say(
                    msg.SafePointReached(
                        me, order.generation, at, Phase.UPDATED, reach, worker.step, (), False, (), None, None
                    ),
                    now_s,
                )
            case msg.Recover():
                worker.step = order.resume_step
                self._say(msg.GroupsReset(me, order.generation), now_s)
                self._say(msg.StateRecovered(me, order.generation, 8, False), now_s)
            case msg.Resume():
                assert worker.step is not None
                self.agent.step_completed(worker.number, order.generation, worker.step, now_s, 0.1)
                worker.step += 1
            case msg.Hold():
                assert worker.step is not None
                self._say(msg.Holding(me, order.generation, worker.step), now_s)
            case msg.Drain():
                self._say(msg.Drained(me, order.generation, worker.rank == 0), now_s)
            case msg.Complete() | msg.Terminate():
                self.exit(worker.number, "", now_s)
            case _:
                pass

    def _say(self, report: msg.WorkerReport, now_s: float) -> None:
        self.agent.said(report.workers[0] if hasattr(report, "workers") else report.worker, report, now_s)


class ToyCluster:
    """The job: one rank on each node, and one node more with room for a spare."""

    def __init__(self, world_size: int = 3, num_spares: int = 1, lease_s: float | None = LEASE_S) -> None:
        self.now_s = 100.0
        self.settings = RecoverySettings(world_size, num_spares, ranks_per_node=1)
        self.lease_s = lease_s
        self.controller = ControllerMachine(self.settings, lease_s)
        self.journal: list[bytes] = []
        self.crash_at: int | None = None
        """The number of entries in the journal when the controller crashes."""
        self.refused: list[msg.NodeEvicted] = []
        self.nodes: dict[str, ToyNode] = {}
        for number in range(world_size + num_spares):
            self.add_node(f"node-{number}")

    # ---- what happens -----------------------------------------------------------------------------------------------

    def add_node(self, name: str, incarnation: int = 1) -> ToyNode:
        """A node's agent starts."""
        self.nodes[name] = node = ToyNode(name, 1, incarnation)
        return node

    def go(self, rounds: int = 60) -> ToyCluster:
        """Packets travel until no process has anything to say."""
        for _ in range(rounds):
            if not self._exchange():
                return self
        raise AssertionError("they do not come to rest")

    def wait(self, duration_s: float) -> ToyCluster:
        """Time goes by, in small pieces, as it does for who lives in it."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + LATE_S / 2)
            for node in self.nodes.values():
                node.agent.tick(self.now_s)
            self.go()
            self.controller.tick(self.now_s)
            self.go()
        return self

    def kill_rank(self, rank: int) -> ToyCluster:
        """The process that holds a rank is killed, at its node."""
        node, worker = self.holder(rank)
        node.exit(worker.number, "killed by SIGKILL", self.now_s)
        return self.go()

    def finish(self) -> ToyCluster:
        """All ranks complete their last step; the scripts end."""
        for node in self.nodes.values():
            for worker in node.workers.values():
                if worker.rank is not None and worker.step is not None and not node.is_cut_off:
                    answer = msg.StepsFinished((worker.number,), self.controller.job.generation, worker.step, "d")
                    node.agent.said(worker.number, answer, self.now_s)
        return self.go()

    def restart_controller(self) -> ToyCluster:
        """The controller is gone, and another one comes back with its journal."""
        self.crash_at = None
        self.controller = ControllerMachine.from_journal(self.settings, self.entries(), self.now_s, self.lease_s)
        for node in self.nodes.values():
            node.agent.reconnected(self.now_s)
            self.controller.reconnected(node.name)
        return self

    # ---- what there is ----------------------------------------------------------------------------------------------

    def entries(self) -> list[JournalEntry]:
        """The journal, as it is read."""
        return [_decoder.decode(line) for line in self.journal]

    def holder(self, rank: int) -> tuple[ToyNode, ToyWorker]:
        """The live process that holds a rank, as the controller sees it."""
        (number,) = (each.worker for each in self.controller.job.roster.holders() if each.rank == rank)
        return next((node, node.workers[number]) for node in self.nodes.values() if number in node.workers)

    def steps(self) -> dict[int, int | None]:
        """rank -> where its parameters are."""
        return {rank: self.holder(rank)[1].step for rank in range(self.settings.world_size)}

    # ---- the network ------------------------------------------------------------------------------------------------

    def _exchange(self) -> bool:
        self.now_s += MOMENT_S
        moved = False
        for node in self.nodes.values():
            node.perform(self.now_s)
            for packet in node.agent.packets(self.now_s):
                if not node.is_cut_off:
                    self._to_controller(packet)
                    moved = True
            while node.departing and not node.is_cut_off:
                self._pass_on()
                self.controller.left(node.departing.pop(), self.now_s)
        self._pass_on()
        self._write()
        for packet in self._from_controller():
            moved = True
            if isinstance(packet, msg.NodeEvicted):
                self.refused.append(packet)
            node = self.nodes[packet.node]
            if not node.is_cut_off:
                node.agent.receive(packet, self.now_s)
                node.perform(self.now_s)
        return moved

    def _to_controller(self, packet: msg.Packet) -> None:
        self.controller.receive(packet, self.now_s)

    def _pass_on(self) -> None:
        """What was gathered goes to the controller: nothing, where there is no relay."""

    def _from_controller(self) -> list[msg.Packet | msg.NodeEvicted]:
        return self.controller.packets(self.now_s)

    def _write(self) -> None:
        for entry in self.controller.take_entries():
            self.journal.append(_encoder.encode(entry))
            if len(self.journal) == self.crash_at:
                raise Crashed


class RelayedCluster(ToyCluster):
    """The same with one relay between nodes and controller."""

    def __init__(self, world_size: int = 3, num_spares: int = 1, lease_s: float | None = LEASE_S) -> None:
        super().__init__(world_size, num_spares, lease_s)
        self._gathering = Gathering()

    def _to_controller(self, packet: msg.Packet) -> None:
        self._gathering.add(NodeSaid(packet.node, packet))

    def _pass_on(self) -> None:
        for item in self._gathering.take() or ():
            if isinstance(item, PacketBundle):
                assert self.controller.receive_bundle(item, self.now_s) == []
            else:
                assert isinstance(item, NodeSaid)
                assert isinstance(item.message, msg.Packet)
                self.controller.receive(item.message, self.now_s)
        self._gathering.taken()

    def _from_controller(self) -> list[msg.Packet | msg.NodeEvicted]:
        alone, bundles = self.controller.bundles(self.now_s, dict.fromkeys(self.nodes, 0))
        return [*alone, *(packet for _, bundle in bundles for packet in bundle.packets())]
