"""The processes that agents start and end: first all ranks, then spares, and fresh ones if no spare is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from keepstep.protocol.messages import Cause, Membership, WorkerLost
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.roster import Node, Roster, Worker
from keepstep.protocol.recovery.settings import RecoverySettings

MAX_SPARE_FAILURES = 3
"""How many fresh processes in a row may be lost before their first step, and are replaced."""


class Processes:
    """Starts and ends the job's processes, within the budget and the room on the nodes."""

    def __init__(self, settings: RecoverySettings, roster: Roster, orders: Orders, notices: list[str]) -> None:
        self._settings = settings
        self._roster = roster
        self._orders = orders
        self._notices = notices
        self._failures = 0
        """Number of fresh processes lost in a row before their first step."""
        self._has_told_of_budget = False

    @property
    def keep_failing(self) -> bool:
        """Whether so many fresh processes were lost in a row that the machine starts no other one."""
        return self._failures > MAX_SPARE_FAILURES

    def room_for_ranks(self) -> int:
        """Returns for how many ranks the nodes have room, including shared devices if that is allowed."""
        return sum(self._share(node) + node.num_shareable for node in self._roster.nodes.values())

    def _share(self, node: Node) -> int:
        """Returns how many ranks belong on a node."""
        return min(node.num_free, self._settings.ranks_per_node or node.num_free)

    def all_ranks_fit(self) -> bool:
        """Returns whether each rank can have a device. Called for each node that joins, so it counts only if needed."""
        world_size, free = self._settings.world_size, self._roster.num_free
        if free < world_size or len(self._roster.nodes) * (self._settings.ranks_per_node or world_size) < world_size:
            return False
        return sum(self._share(node) for node in self._roster.nodes.values()) >= world_size

    def all_spares_fit(self) -> bool:
        """Returns whether there is room for all ranks and all spares."""
        return self._roster.num_free >= self._settings.world_size + self._settings.num_spares

    def start_ranks(self, reason: str) -> None:
        """Starts a process for every rank, node by node. Nodes in quarantine come last, then shared devices."""
        nodes = self._roster.nodes.values()
        order = sorted(nodes, key=lambda each: (self._roster.is_held(each.name), each.position))  # a stable sort
        places = [node for node in order for _ in range(self._share(node))]
        started: list[Worker] = []
        self._roster.forget_local_ranks()
        for rank in range(self._settings.world_size):
            node = places[rank] if rank < len(places) else self._roster.least_oversubscribed()
            assert node is not None, "ranks are started where they all have room"
            started.append(self._roster.add(node.name, rank))
        for worker in started:
            worker.local_world_size = self._roster.local_world_size(worker.node)
            self._orders.start(worker, reason)

    def fence_ranks(self, reason: str) -> None:
        """Ends the process of every rank."""
        self._fence(list(self._roster.holders()), reason)

    def top_up_spares(self, reason: str) -> None:
        """Starts spares until there are as many as requested, and one more for each rank that must move.

        Spares in quarantine do not count, unless there is no room elsewhere.
        """
        wanted = self._settings.num_spares + len(self._roster.displaced())
        for _ in range(wanted - self._roster.num_sound_spares):
            if not self._roster.may_start():
                self._tell_of_budget()
                return
            node = self._roster.roomiest()
            if node is None or self.keep_failing:
                return
            if self._roster.penalty(node.name) and len(self._roster.spares()) >= wanted:
                return
            self._start_spare(node.name, reason)

    def start_fresh(self, missing_ranks: list[int], tied: Mapping[int, str]) -> bool:
        """Starts fresh processes for the missing ranks that existing spares, warm or still starting, do not cover.

        Args:
            missing_ranks: the ranks that no live worker holds.
            tied: missing rank -> the node on which its process must be.

        Returns:
            False if the budget is used up. A lack of room is no failure, because a node may join.
        """
        there = Counter(spare.node for spare in self._roster.spares())
        for rank, node in tied.items():
            there[node] -= 1
            if there[node] >= 0:
                continue
            if not self._roster.may_start():
                return False
            if self._roster.nodes[node].num_room:
                self._start_spare(node, f"a fresh process takes rank {rank}, whose snapshot is in the memory there")
        for rank in missing_ranks[len(self._roster.spares()) :]:
            if not self._roster.may_start():
                return False
            place = self._roster.roomiest(near=self._roster.node_of(rank)) or self._roster.least_oversubscribed()
            if place is not None:
                self._start_spare(place.name, "no spare is left: a fresh process takes the rank")
        return True

    def fence_spares(self, reason: str) -> None:
        """Ends the process of every spare."""
        self._fence(list(self._roster.spares()), reason)

    def close_node(self, name: str, reason: str) -> None:
        """Closes a node that drains: its ranks must move, and its spares end."""
        self._fence(self._roster.close_node(name), reason)

    def close_devices(self, name: str, devices: Collection[int], reason: str) -> None:
        """Closes unhealthy devices of a node: the ranks there must move, and the spares there end."""
        self._fence(self._roster.close_devices(name, devices, reason), reason)

    def give_up_unfenced(self) -> None:
        """Treats lost processes as gone that cannot be killed, as one that hangs in a driver or in a storage system.

        SIGKILL is pending, so such a process executes no line of the script any more, and its generation is over for
        all others. It may still hold memory of its device, which is closed.
        """
        for worker in list(self._roster.unfenced()):
            self.close_devices(
                worker.node, {worker.device}, f"process {worker.pid} cannot be killed and may still use it"
            )
            self._roster.mark_gone(worker)

    def none_can_come(self, num_missing: int) -> bool:
        """Returns whether spares and room are too few for ``num_missing`` ranks, and no other node may join."""
        if self._settings.nodes_may_join:
            return False
        return len(self._roster.spares()) + sum(node.num_room for node in self._roster.nodes.values()) < num_missing

    def _fence(self, workers: Iterable[Worker], reason: str) -> None:
        for worker in workers:
            self._roster.mark_lost(worker, gone=False)
            self._orders.fence(worker, reason)

    def move(self, membership: Membership, now_s: float) -> list[tuple[Worker, WorkerLost]]:
        """Marks displaced workers as lost whose ranks can move now, and returns them with the reasons.

        A rank can move if a warm spare can take it and another rank holds its shard. No rank moves while more useful
        spares are still starting, so that all move in one recovery.
        """
        roster = self._roster
        displaced = roster.displaced()
        if not displaced or roster.num_ready_spares < min(len(roster.spares()), len(displaced)):
            return []
        left = Counter(membership.shard(worker.rank) for worker in roster.holders() if worker.rank is not None)
        moved: list[tuple[Worker, WorkerLost]] = []
        for worker in sorted(displaced, key=lambda each: each.worker):
            assert worker.rank is not None
            if len(moved) < roster.num_ready_spares and left[membership.shard(worker.rank)] > 1:
                left[membership.shard(worker.rank)] -= 1
                why = self._why_displaced(worker)
                moved.append((worker, WorkerLost(worker.worker, Cause.MOVED, why, False, None, now_s)))
        for worker, _ in moved:
            roster.mark_lost(worker, gone=False)
        return moved

    def _why_displaced(self, worker: Worker) -> str:
        node = self._roster.nodes[worker.node]
        if node.is_closed:
            return "its node drains"
        if worker.device in node.closed:
            return f"its device is sick: {node.closed[worker.device]}"
        return "it shared a device, and another one is free"

    def lost_before_ready(self, detail: str) -> None:
        """Records that a fresh process was lost before its first step."""
        self._failures += 1
        if self._failures == MAX_SPARE_FAILURES + 1:
            self._notices.append(
                f"no spare can be started: {self._failures} in a row have ended before their first step, the last one "
                f"with: {detail}; {self._after_spares()} will wait for a fresh process"
            )

    def _tell_of_budget(self) -> None:
        if not self._has_told_of_budget:
            self._has_told_of_budget = True
            self._notices.append(
                f"no further spare is started: --max-restarts is used up; {self._after_spares()} ends the job"
            )

    def _after_spares(self) -> str:
        num = len(self._roster.spares())
        if not num:
            return "the next loss"
        return "1 is left, and the loss after it" if num == 1 else f"{num} are left, and the loss after them"

    def came_up(self) -> None:
        """Records that a fresh process has reached its first step."""
        self._failures = 0

    def _start_spare(self, node: str, reason: str) -> None:
        self._orders.start(self._roster.add(node, None), reason)
