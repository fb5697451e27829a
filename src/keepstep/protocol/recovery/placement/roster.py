"""The controller's list of nodes and workers: rank holders, spares, lost workers, free slots.

Counts that every report needs are updated incrementally: a job has up to a hundred thousand workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from keepstep.protocol.messages import Member, Membership, MembershipChange, NodeJoined, SafePointReached, WorkerReady
from keepstep.protocol.recovery.placement.quarantine import Place, Quarantine
from keepstep.protocol.recovery.placement.topology import Placement, choose_local_rank, choose_spare
from keepstep.protocol.recovery.settings import RecoverySettings


@dataclasses.dataclass(slots=True)
class Worker:
    """What the controller knows of one worker process."""

    worker: int
    node: str
    device: int
    rank: int | None
    local_world_size: int
    """How many ranks its node holds, its ``LOCAL_WORLD_SIZE``."""
    local_rank: int | None = None
    """Its number among the ranks of its node; None for a spare."""
    pid: int | None = None
    ready: WorkerReady | None = None
    """Its last word that it stands at its first step; None while it starts up."""
    awaits_rank: bool = False
    """A spare whose script can go no further without a rank."""
    lost: bool = False
    gone: bool = False
    """Its process no longer exists (a lost worker that is not gone must be fenced)."""
    done: bool = False
    completed_steps: int | None = None
    """How many steps it had completed when its script ended; None where that is not known, or there was no first."""
    safe: SafePointReached | None = None
    """Its safe point in the current generation."""
    inherits: frozenset[int] = frozenset()
    """The steps of the snapshots that the rank's former process has left to it."""
    rescued: str | None = None
    """Where it saved its shard."""
    rescue_error: str | None = None
    """Why it could not."""
    error: str | None = None

    def explain(self, detail: str) -> str:
        """How it was lost, with the error of its script, if it has told one."""
        return detail if self.error is None else f"{detail}: {self.error}"


@dataclasses.dataclass(slots=True)
class Node:
    """One machine of the job."""

    name: str
    slots: int
    most: int
    """So many workers it takes in where there is no other room, and then they share devices."""
    domain: str
    position: int = 0
    is_closed: bool = False
    """It drains, and has no free slots."""
    workers: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those whose process exists there, be it that of a worker that is lost and not yet gone, with its device."""
    closed: dict[int, str] = dataclasses.field(default_factory=dict)
    """Devices on which nothing more is started, with the reason: they are sick."""

    def devices(self) -> tuple[list[int], list[int]]:
        """The devices that are free, and the numbers beyond them under which workers may share one."""
        taken = {*self.workers.values(), *self.closed}
        numbers = [device for device in range(self.most) if device not in taken]
        return [each for each in numbers if each < self.slots], [each for each in numbers if each >= self.slots]

    @property
    def num_free(self) -> int:
        """On how many devices nothing runs, and something may."""
        taken = self.workers.values() if not self.closed else {*self.workers.values(), *self.closed}
        return self.slots - sum(device < self.slots for device in taken)

    @property
    def num_shareable(self) -> int:
        """How many workers it takes in beyond those that have a device of their own."""
        return self.most - self.slots - sum(self.slots <= device < self.most for device in self.closed)

    @property
    def num_room(self) -> int:
        """How many more workers it takes in, with devices shared where that is allowed."""
        taken = self.workers.values() if not self.closed else {*self.workers.values(), *self.closed}
        return self.most - sum(device < self.most for device in taken)


class Roster:
    """All nodes and workers of the job, and the process budget."""

    def __init__(self, settings: RecoverySettings, quarantine: Quarantine) -> None:
        self.world_size = settings.world_size
        self._quarantine = quarantine
        self._most_per_node = settings.most_per_node
        self._ranks_per_node = settings.ranks_per_node or 0
        first = settings.world_size + settings.num_spares
        self.max_starts = None if settings.max_restarts is None else first + settings.max_restarts
        """How many processes may be started in all, None for no bound."""
        self.nodes: dict[str, Node] = {}
        self.workers: dict[int, Worker] = {}
        """Every worker there ever was."""
        self.num_started = 0
        self.num_free = 0
        """On how many devices of all nodes nothing runs."""
        self._holders: dict[int, Worker] = {}
        self._spares: dict[int, Worker] = {}
        self._unfenced: dict[int, Worker] = {}
        self._displaced: dict[int, Worker] = {}
        self._last_place: dict[int, Placement] = {}
        """rank -> where its process is, or was: the node itself may be given up by now."""
        self._last_local_rank: dict[int, int] = {}
        """rank -> the local rank that its process has there, or had."""

    def membership(self) -> Membership:
        """All rank holders as one value, with the shards that they reported. Every rank has a holder."""
        holders = (self._holders[rank] for rank in range(self.world_size))
        return Membership.of(self._member(each, each.ready.shard if each.ready else "") for each in holders)

    def change_since(self, before: Membership) -> MembershipChange:
        """The ranks that have another holder than in an earlier membership; they hold the same shards as there."""
        holders, ranks = self._holders, enumerate(before.workers)
        changed = [(rank, each) for rank, worker in ranks if (each := holders[rank]).worker != worker]
        return MembershipChange(tuple((rank, self._member(each, before.shard(rank))) for rank, each in changed))

    def _member(self, worker: Worker, shard: str) -> Member:
        domain = self.nodes[worker.node].domain
        return Member(worker.worker, worker.node, shard, "" if domain == worker.node else domain)

    def live_on(self, nodes: Sequence[str], numbers: Sequence[Sequence[int]]) -> list[int]:
        """Those workers of some nodes, by node, that are there and not lost."""
        found, known = [], self.nodes
        for node, workers in zip(nodes, numbers, strict=True):
            if node in known:
                there = known[node].workers
                found += [number for number in workers if number in there]
        return [number for number in found if number not in self._unfenced] if self._unfenced else found

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def add_node(self, joined: NodeJoined) -> None:
        """Enters a node that has offered itself."""
        most = max(joined.slots, self._most_per_node)
        node = Node(joined.node, joined.slots, most, joined.domain, joined.position)
        node.closed = dict.fromkeys(joined.closed, "it was closed when the node joined")
        self.nodes[joined.node] = node
        self.num_free += node.num_free

    def remove_node(self, name: str) -> list[Worker]:
        """A node is given up with everything on it; returns the workers that were live there."""
        node = self.nodes.get(name)
        if node is None:
            return []
        there = [self.workers[number] for number in sorted(node.workers)]
        live = [worker for worker in there if not worker.lost]
        for worker in there:
            self.mark_lost(worker, gone=True)
        self.num_free -= node.num_free
        del self.nodes[name]
        return live

    def close_node(self, name: str) -> list[Worker]:
        """A node drains: it has no room any more, and its ranks are displaced. Returns the spares there."""
        node = self.nodes.get(name)
        if node is None:
            return []
        self.num_free -= node.num_free
        node.slots, node.most, node.is_closed = 0, 0, True
        live = [self.workers[number] for number in sorted(node.workers) if not self.workers[number].lost]
        self._displaced |= {worker.worker: worker for worker in live if worker.rank is not None}
        return [worker for worker in live if worker.rank is None]

    def close_devices(self, name: str, devices: Collection[int], reason: str) -> list[Worker]:
        """Nothing more is started on devices of a node, and a rank there is displaced. Returns the spares there."""
        node = self.nodes.get(name)
        if node is None or node.is_closed:
            return []
        before = node.num_free
        node.closed |= dict.fromkeys(devices, reason)
        self.num_free += node.num_free - before
        there = [self.workers[number] for number, device in sorted(node.workers.items()) if device in devices]
        live = [worker for worker in there if not worker.lost]
        self._displaced |= {worker.worker: worker for worker in live if worker.rank is not None}
        return [worker for worker in live if worker.rank is None]

    def roomiest(self, near: str | None = None) -> Node | None:
        """The node for a new process: ``near`` if it has a free device, else that with most; None if none has.

        A place in quarantine comes after all others.
        """
        if self.num_free <= 0:
            return None
        if near in self.nodes and self.nodes[near].num_free > 0 and not self.penalty(near):
            return self.nodes[near]
        if not self._quarantine.held:
            return max(self.nodes.values(), key=lambda node: node.num_free)
        there = [node for node in self.nodes.values() if node.num_free > 0]
        return min(there, key=lambda node: (self.penalty(node.name), node.name != near, -node.num_free))

    def takes_in(self, node: str) -> int:
        """How many replacements can be on a node: what it has room for, and its spares."""
        num_room = self.nodes[node].num_room if node in self.nodes else 0
        return num_room + sum(spare.node == node for spare in self._spares.values())

    def is_held(self, node: str) -> bool:
        """Whether a node is in quarantine."""
        return Place(node) in self._quarantine.held

    def least_oversubscribed(self) -> Node | None:
        """The node for a rank where no device is free: that with most room beyond them; None if there is none."""
        there = [node for node in self.nodes.values() if node.num_room > 0]
        return min(there, key=lambda node: (self.is_held(node.name), -node.num_room), default=None)

    def penalty(self, node: str) -> int:
        """The penalty of the best free device of a node that has one."""
        return min(self._quarantine.penalty(node, device) for device in self.nodes[node].devices()[0])

    # ---- workers ----------------------------------------------------------------------------------------------------

    def add(self, node: str, rank: int | None) -> Worker:
        """Enters a worker that is about to be started."""
        free, beyond = self.nodes[node].devices()
        device = min(free or beyond, key=lambda each: (self._quarantine.penalty(node, each), each))
        worker = Worker(self.num_started, node, device, rank, self._ranks_per_node)
        self.workers[worker.worker] = worker
        self.num_started += 1
        self.nodes[node].workers[worker.worker] = device
        self.num_free -= bool(free)
        if rank is None:
            self._spares[worker.worker] = worker
        else:
            self._hold(worker, rank)
        return worker

    def forget_local_ranks(self) -> None:
        """All ranks restart: they are numbered as at the first start."""
        self._last_local_rank.clear()

    def give_ranks(self, replacements: Mapping[int, Worker]) -> None:
        """Spares hold ranks from now on. Those that stay on their node come first: their local ranks wait for them."""
        for rank in sorted(replacements, key=lambda rank: self._moves(rank, replacements[rank])):
            self.give_rank(replacements[rank], rank)

    def give_rank(self, worker: Worker, rank: int) -> None:
        """A spare holds a rank from now on."""
        worker.rank = rank
        del self._spares[worker.worker]
        self._hold(worker, rank)

    def _moves(self, rank: int, worker: Worker) -> bool:
        """Whether the rank would come to another node with that worker than it was on."""
        return rank not in self._last_place or self._last_place[rank].node != worker.node

    def local_world_size(self, node: str) -> int:
        """How many ranks belong on the node, or how many it holds where those are more."""
        return max(self._ranks_per_node, 1 + max(self._local_ranks(node), default=-1))

    def _local_ranks(self, node: str) -> set[int]:
        """The local ranks that are taken on a node."""
        there = (self.workers[number] for number in self.nodes[node].workers)
        holders = (worker for worker in there if worker.rank is not None and not worker.lost and not worker.done)
        return {worker.local_rank for worker in holders if worker.local_rank is not None}

    def _hold(self, worker: Worker, rank: int) -> None:
        before = None if self._moves(rank, worker) else self._last_local_rank.get(rank)
        worker.local_rank = choose_local_rank(before, self._local_ranks(worker.node), self._ranks_per_node)
        worker.local_world_size = max(self.local_world_size(worker.node), worker.local_rank + 1)
        self._last_local_rank[rank] = worker.local_rank
        self._holders[rank] = worker
        self._last_place[rank] = self._place(worker)
        if worker.device >= self.nodes[worker.node].slots:
            self._displaced[worker.worker] = worker

    def mark_lost(self, worker: Worker, *, gone: bool) -> None:
        """A worker can do nothing any more; ``gone`` where its process no longer exists."""
        if not worker.lost and not worker.done:
            worker.lost = True
            self._forget_live(worker)
            self._unfenced[worker.worker] = worker
        if gone:
            self.mark_gone(worker)

    def mark_gone(self, worker: Worker) -> None:
        """The process of a worker no longer exists."""
        if worker.gone:
            return
        worker.gone = True
        self._unfenced.pop(worker.worker, None)
        if worker.node in self.nodes:
            node = self.nodes[worker.node]
            device = node.workers.pop(worker.worker, None)
            self.num_free += device is not None and device < node.slots and device not in node.closed

    def mark_done(self, worker: Worker, completed_steps: int | None) -> None:
        """The script of a worker that is not lost is through."""
        worker.done, worker.completed_steps = True, completed_steps
        self._forget_live(worker)
        self.mark_gone(worker)

    def _forget_live(self, worker: Worker) -> None:
        self._spares.pop(worker.worker, None)
        self._displaced.pop(worker.worker, None)
        if worker.rank is not None and self._holders.get(worker.rank) is worker:
            del self._holders[worker.rank]

    def may_start(self, num_processes: int = 1) -> bool:
        """Whether the budget allows so many more processes."""
        return self.max_starts is None or self.num_started + num_processes <= self.max_starts

    # ---- who is there -----------------------------------------------------------------------------------------------

    def holders(self) -> Collection[Worker]:
        """The live workers that hold a rank, in no particular order; a view that changes with the roster."""
        return self._holders.values()

    def holder(self, rank: int) -> Worker:
        """The live worker that holds a rank; there has to be one."""
        return self._holders[rank]

    @property
    def num_holders(self) -> int:
        """How many live workers hold a rank."""
        return len(self._holders)

    def holder_numbers(self) -> set[int]:
        """The numbers of the live workers that hold a rank."""
        return {worker.worker for worker in self._holders.values()}

    def ranks_of(self, numbers: Iterable[int]) -> list[int | None]:
        """The ranks of workers, by their numbers."""
        return [self.workers[number].rank for number in sorted(numbers)]

    def spares(self) -> Collection[Worker]:
        """The live workers without a rank, warm or still starting; a view that changes with the roster."""
        return self._spares.values()

    def displaced(self) -> Collection[Worker]:
        """The live workers that hold a rank and ought to be elsewhere: they share a device, it is sick, or their node
        is to leave.

        A view that changes with the roster.
        """
        return self._displaced.values()

    @property
    def num_sound_spares(self) -> int:
        """How many live workers without a rank are at a place that is not in quarantine."""
        return sum(not self._quarantine.penalty(spare.node, spare.device) for spare in self._spares.values())

    @property
    def num_warm_spares(self) -> int:
        """How many spares can take a rank: they stand at their first step, or can go no further without one."""
        return sum(spare.ready is not None or spare.awaits_rank for spare in self._spares.values())

    @property
    def num_ready_spares(self) -> int:
        """How many spares stand at their first step."""
        return sum(spare.ready is not None for spare in self._spares.values())

    def missing_ranks(self) -> list[int]:
        """The ranks that no live worker holds."""
        if len(self._holders) == self.world_size:
            return []
        return [rank for rank in range(self.world_size) if rank not in self._holders]

    def unfenced(self) -> Collection[Worker]:
        """The lost workers whose process may still exist; a view that changes with the roster."""
        return self._unfenced.values()

    def node_of(self, rank: int) -> str:
        """Where the rank is, or was last."""
        return self._last_place[rank].node

    def replacements(self, tied: Mapping[int, str]) -> dict[int, Worker] | None:
        """A spare for every missing rank, or None where there are too few. Nothing is given out yet.

        Those that stand at their first step come before those that only wait for a rank.

        Args:
            tied: ranks whose spare has to be on a node; they choose first.
        """
        ready = {spare.worker: self._place(spare) for spare in self.spares() if spare.ready}
        waiting = {spare.worker: self._place(spare) for spare in self.spares() if spare.awaits_rank and not spare.ready}
        chosen: dict[int, Worker] = {}
        for rank in sorted(self.missing_ranks(), key=lambda rank: rank not in tied):
            pool = ready or waiting
            if rank in tied:
                pool = next((each for each in (ready, waiting) if any(p.node == tied[rank] for p in each.values())), {})
            was_at = self._last_place[rank]
            there = {number: place for number, place in pool.items() if place.node == tied.get(rank, place.node)}
            spare = choose_spare(was_at, there, node_at_fault=was_at.node not in self.nodes)
            if spare is None:
                return None
            del pool[spare]
            chosen[rank] = self.workers[spare]
        return chosen

    def _place(self, worker: Worker) -> Placement:
        penalty = self._quarantine.penalty(worker.node, worker.device)
        return Placement(worker.node, self.nodes[worker.node].domain, penalty)
