"""The controller's list of nodes and workers: rank holders, spares, lost workers, free slots.

Counts that every report needs are updated incrementally, because a job has up to a hundred thousand workers.
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
    """The controller's knowledge of one worker process."""

    worker: int
    node: str
    device: int
    rank: int | None
    local_world_size: int
    """Number of ranks on its node: its ``LOCAL_WORLD_SIZE``."""
    local_rank: int | None = None
    """Its ``LOCAL_RANK``; None for a spare."""
    pid: int | None = None
    ready: WorkerReady | None = None
    """Its last report that it is at its first step; None while it starts up."""
    awaits_rank: bool = False
    """Whether it is a spare whose script waits at a line that needs the rank."""
    lost: bool = False
    gone: bool = False
    """Whether its process no longer exists. A lost worker that is not gone must be fenced."""
    done: bool = False
    completed_steps: int | None = None
    """Number of steps that it had completed when its script ended; None if unknown, or if it had none."""
    safe: SafePointReached | None = None
    """Its report of a safe point in the current generation."""
    inherits: frozenset[int] = frozenset()
    """The steps of the rank's kept snapshots on its node that it may load."""
    rescued: str | None = None
    """The file to which it has saved its shard."""
    rescue_error: str | None = None
    """Why it could not save its shard."""
    error: str | None = None

    def explain(self, detail: str) -> str:
        """Returns ``detail`` with the error of the worker's script, if it has reported one."""
        return detail if self.error is None else f"{detail}: {self.error}"


@dataclasses.dataclass(slots=True)
class Node:
    """One machine of the job."""

    name: str
    slots: int
    num_devices: int
    """The first so many slots are devices, such as GPUs; 0: the workers use none."""
    most: int
    """Most workers on the node if there is no other room. Workers beyond ``slots`` share devices."""
    domain: str
    position: int = 0
    is_closed: bool = False
    """Whether the node drains. Then it has no free slots."""
    workers: dict[int, int] = dataclasses.field(default_factory=dict)
    """worker -> its device, for all processes that exist on the node, including lost ones that are not gone yet."""
    closed: dict[int, str] = dataclasses.field(default_factory=dict)
    """Unhealthy device, on which no process is started any more -> reason."""

    def devices(self) -> tuple[list[int], list[int]]:
        """Returns the free devices, and the free numbers beyond the devices, with which workers share a device."""
        taken = {*self.workers.values(), *self.closed}
        numbers = [device for device in range(self.most) if device not in taken]
        return [each for each in numbers if each < self.slots], [each for each in numbers if each >= self.slots]

    @property
    def num_free(self) -> int:
        """Number of open devices without a process."""
        taken = self.workers.values() if not self.closed else {*self.workers.values(), *self.closed}
        return self.slots - sum(device < self.slots for device in taken)

    @property
    def num_shareable(self) -> int:
        """How many workers may share devices, in addition to those with their own device."""
        return self.most - self.slots - sum(self.slots <= device < self.most for device in self.closed)

    @property
    def num_room(self) -> int:
        """How many more workers fit on the node, including shared devices if that is allowed."""
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
        """How many processes may be started in all; None: no limit."""
        self.nodes: dict[str, Node] = {}
        self.workers: dict[int, Worker] = {}
        """All workers of the job, including lost ones."""
        self.num_started = 0
        self.num_free = 0
        """Number of open devices without a process, on all nodes."""
        self._holders: dict[int, Worker] = {}
        self._spares: dict[int, Worker] = {}
        self._unfenced: dict[int, Worker] = {}
        self._displaced: dict[int, Worker] = {}
        self._last_place: dict[int, Placement] = {}
        """rank -> the last placement of its process. The node may be lost by now."""
        self._last_local_rank: dict[int, int] = {}
        """rank -> the last local rank of its process."""

    def membership(self) -> Membership:
        """Returns the membership of all rank holders, with their reported shards. Every rank must have a holder."""
        holders = (self._holders[rank] for rank in range(self.world_size))
        return Membership.of(self._member(each, each.ready.shard if each.ready else "") for each in holders)

    def change_since(self, before: Membership) -> MembershipChange:
        """Returns the change since an earlier membership: the ranks with another holder. Their shards stay the same."""
        holders, ranks = self._holders, enumerate(before.workers)
        changed = [(rank, each) for rank, worker in ranks if (each := holders[rank]).worker != worker]
        return MembershipChange(tuple((rank, self._member(each, before.shard(rank))) for rank, each in changed))

    def _member(self, worker: Worker, shard: str) -> Member:
        domain = self.nodes[worker.node].domain
        return Member(worker.worker, worker.node, shard, "" if domain == worker.node else domain)

    def live_on(self, nodes: Sequence[str], numbers: Sequence[Sequence[int]]) -> list[int]:
        """Returns the workers among ``numbers`` that exist on their node and are not lost.

        Args:
            nodes: names of nodes.
            numbers: for each node, numbers of workers.
        """
        found, known = [], self.nodes
        for node, workers in zip(nodes, numbers, strict=True):
            if node in known:
                there = known[node].workers
                found += [number for number in workers if number in there]
        return [number for number in found if number not in self._unfenced] if self._unfenced else found

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def add_node(self, joined: NodeJoined) -> None:
        """Adds a node that has joined."""
        most = max(joined.slots, self._most_per_node)
        node = Node(joined.node, joined.slots, joined.num_devices, most, joined.domain, joined.position)
        node.closed = dict.fromkeys(joined.closed, "it was closed when the node joined")
        self.nodes[joined.node] = node
        self.num_free += node.num_free

    def remove_node(self, name: str) -> list[Worker]:
        """Removes a node and marks all its workers as lost and gone. Returns those that were live."""
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
        """Closes a node that drains: it has no room any more, and its ranks are displaced. Returns its spares."""
        node = self.nodes.get(name)
        if node is None:
            return []
        self.num_free -= node.num_free
        node.slots, node.most, node.is_closed = 0, 0, True
        live = [self.workers[number] for number in sorted(node.workers) if not self.workers[number].lost]
        self._displaced |= {worker.worker: worker for worker in live if worker.rank is not None}
        return [worker for worker in live if worker.rank is None]

    def close_devices(self, name: str, devices: Collection[int], reason: str) -> list[Worker]:
        """Closes devices of a node: no process starts there, and their ranks are displaced. Returns their spares."""
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
        """Returns the node for a new process: ``near`` if it has a free device, else the one with most free devices.

        Nodes in quarantine, or with only devices in quarantine, come last. Returns None if no device is free.
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
        """Returns how many replacements can be on a node: its room, plus its spares."""
        num_room = self.nodes[node].num_room if node in self.nodes else 0
        return num_room + sum(spare.node == node for spare in self._spares.values())

    def device_of(self, worker: Worker) -> Place | None:
        """Returns the device of a worker; None if it uses none, or if only its agent knows which one it shares."""
        node = self.nodes.get(worker.node)
        return Place(worker.node, worker.device) if node and worker.device < node.num_devices else None

    def is_held(self, node: str) -> bool:
        """Returns whether a node is in quarantine."""
        return Place(node) in self._quarantine.held

    def least_oversubscribed(self) -> Node | None:
        """Returns the node for a rank if no device is free: the one with most room to share; None if there is none."""
        there = [node for node in self.nodes.values() if node.num_room > 0]
        return min(there, key=lambda node: (self.is_held(node.name), -node.num_room), default=None)

    def penalty(self, node: str) -> int:
        """Returns the least penalty of a node's free devices. The node must have one."""
        return min(self._quarantine.penalty(node, device) for device in self.nodes[node].devices()[0])

    # ---- workers ----------------------------------------------------------------------------------------------------

    def add(self, node: str, rank: int | None) -> Worker:
        """Adds a worker that is about to be started, and chooses its device."""
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
        """Forgets all local ranks, because all ranks restart and are numbered anew."""
        self._last_local_rank.clear()

    def give_ranks(self, replacements: Mapping[int, Worker]) -> None:
        """Gives ranks to spares. Ranks that stay on their node come first, so that they keep their local ranks."""
        for rank in sorted(replacements, key=lambda rank: self._moves(rank, replacements[rank])):
            self.give_rank(replacements[rank], rank)

    def give_rank(self, worker: Worker, rank: int) -> None:
        """Gives a rank to a spare."""
        worker.rank = rank
        del self._spares[worker.worker]
        self._hold(worker, rank)

    def _moves(self, rank: int, worker: Worker) -> bool:
        """Returns whether the worker is on another node than the rank's last one."""
        return rank not in self._last_place or self._last_place[rank].node != worker.node

    def local_world_size(self, node: str) -> int:
        """Returns ``LOCAL_WORLD_SIZE``: how many ranks belong on the node, or how many it holds if those are more."""
        return max(self._ranks_per_node, 1 + max(self._local_ranks(node), default=-1))

    def _local_ranks(self, node: str) -> set[int]:
        """Returns the local ranks in use on a node."""
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
        """Marks a worker as lost. ``gone``: its process no longer exists."""
        if not worker.lost and not worker.done:
            worker.lost = True
            self._forget_live(worker)
            self._unfenced[worker.worker] = worker
        if gone:
            self.mark_gone(worker)

    def mark_gone(self, worker: Worker) -> None:
        """Records that a worker's process no longer exists, and frees its device."""
        if worker.gone:
            return
        worker.gone = True
        self._unfenced.pop(worker.worker, None)
        if worker.node in self.nodes:
            node = self.nodes[worker.node]
            device = node.workers.pop(worker.worker, None)
            self.num_free += device is not None and device < node.slots and device not in node.closed

    def mark_done(self, worker: Worker, completed_steps: int | None) -> None:
        """Records that the script of a live worker has ended without an error."""
        worker.done, worker.completed_steps = True, completed_steps
        self._forget_live(worker)
        self.mark_gone(worker)

    def _forget_live(self, worker: Worker) -> None:
        self._spares.pop(worker.worker, None)
        self._displaced.pop(worker.worker, None)
        if worker.rank is not None and self._holders.get(worker.rank) is worker:
            del self._holders[worker.rank]

    def may_start(self, num_processes: int = 1) -> bool:
        """Returns whether the budget allows so many more processes."""
        return self.max_starts is None or self.num_started + num_processes <= self.max_starts

    # ---- live workers -----------------------------------------------------------------------------------------------

    def holders(self) -> Collection[Worker]:
        """Returns the live workers that hold a rank, in no particular order: a view that changes with the roster."""
        return self._holders.values()

    def holder(self, rank: int) -> Worker:
        """Returns the live worker that holds a rank. There must be one."""
        return self._holders[rank]

    @property
    def num_holders(self) -> int:
        """Number of live workers that hold a rank."""
        return len(self._holders)

    def holder_numbers(self) -> set[int]:
        """Returns the numbers of the live workers that hold a rank."""
        return {worker.worker for worker in self._holders.values()}

    def ranks_of(self, numbers: Iterable[int]) -> list[int | None]:
        """Returns the ranks of workers, in the order of the workers' numbers."""
        return [self.workers[number].rank for number in sorted(numbers)]

    def spares(self) -> Collection[Worker]:
        """Returns the live workers without a rank, warm or still starting: a view that changes with the roster."""
        return self._spares.values()

    def displaced(self) -> Collection[Worker]:
        """Returns the live rank holders that must move: a view that changes with the roster.

        They share a device, their device is unhealthy, or their node drains.
        """
        return self._displaced.values()

    @property
    def num_sound_spares(self) -> int:
        """Number of spares at places that are not in quarantine."""
        return sum(not self._quarantine.penalty(spare.node, spare.device) for spare in self._spares.values())

    @property
    def num_warm_spares(self) -> int:
        """Number of spares that can take a rank: at their first step, or at a line that needs the rank."""
        return sum(spare.ready is not None or spare.awaits_rank for spare in self._spares.values())

    @property
    def num_ready_spares(self) -> int:
        """Number of spares that are at their first step."""
        return sum(spare.ready is not None for spare in self._spares.values())

    def missing_ranks(self) -> list[int]:
        """Returns the ranks that no live worker holds."""
        if len(self._holders) == self.world_size:
            return []
        return [rank for rank in range(self.world_size) if rank not in self._holders]

    def unfenced(self) -> Collection[Worker]:
        """Returns the lost workers whose process may still exist: a view that changes with the roster."""
        return self._unfenced.values()

    def node_of(self, rank: int) -> str:
        """Returns the node of the rank's current or last holder."""
        return self._last_place[rank].node

    def replacements(self, tied: Mapping[int, str]) -> dict[int, Worker] | None:
        """Chooses a spare for every missing rank, without giving out any rank. Returns None if there are too few.

        Spares at their first step come before those that wait at a line that needs the rank.

        Args:
            tied: rank -> the node on which its spare must be. These ranks choose first.
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
