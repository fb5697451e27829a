"""Giving ranks to spares: those that were lost, and those that are to move. Waiting, where there are too few."""

from __future__ import annotations

from collections import Counter

from keepstep.protocol.messages import Cause, Membership, WorkerLost
from keepstep.protocol.recovery.end.ending import Ending
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.processes import Processes
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.protocol.recovery.stages import Course, RecoverySettings


class Replacing:
    """Of one job."""

    def __init__(
        self,
        settings: RecoverySettings,
        course: Course,
        roster: Roster,
        orders: Orders,
        processes: Processes,
        ending: Ending,
    ) -> None:
        self._start_deadline_s = settings.start_deadline_s
        self._course = course
        self._roster = roster
        self._orders = orders
        self._processes = processes
        self._ending = ending
        self._waited_in = 0
        """The last generation in which processes or nodes were waited for."""

    def fill_ranks(self, record: RecoveryRecord, now_s: float, draining: str | None) -> bool:
        """Gives every missing rank a warm spare, or none yet where there are too few. True when all are filled.

        Args:
            record: of the recovery.
            now_s: the time.
            draining: why the job is to end soon, which leaves no time to wait for spares; None while it is not.
        """
        replacements = self._roster.replacements()
        if replacements is None and draining is not None:
            self._ending.rescue(f"{draining}, and no spare is warm for ranks {self._roster.missing_ranks()}", now_s)
            return False
        if replacements is None:
            self._wait_for_processes(record, now_s)
            return False
        self._roster.give_ranks(replacements)
        for rank, worker in replacements.items():
            record.replacements[rank] = worker.worker
            self._orders.assign(worker, self._course.generation, f"spare {worker.worker} takes rank {rank}")
        return True

    def _wait_for_processes(self, record: RecoveryRecord, now_s: float) -> None:
        if not self._processes.start_fresh(self._roster.missing_ranks()):
            self._ending.rescue(f"--max-restarts is used up: {record.detail}", now_s)
            return
        self.wait_for_help(now_s)

    def wait_for_help(self, now_s: float) -> None:
        """For a process to come up or a node to join: once in a recovery, for events must not put the end off."""
        if self._waited_in != self._course.generation:
            self._waited_in, self._course.deadline_s = self._course.generation, now_s + self._start_deadline_s

    def close_node(self, name: str, reason: str) -> None:
        """A node is to leave: its ranks are to move, and its spares are of no use."""
        for spare in self._roster.close_node(name):
            self._roster.mark_lost(spare, gone=False)
            self._orders.fence(spare, reason)

    def move(self, membership: Membership, now_s: float) -> list[tuple[Worker, WorkerLost]]:
        """Marks the workers as lost whose ranks go elsewhere now, and says so of each.

        They go as far as warm spares can take their ranks and others hold their shards. None goes while more such
        spares are still starting: all go in one recovery.
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
                is_closed = roster.nodes[worker.node].is_closed
                why = "its node is to leave" if is_closed else "it shared a device, and another one is free"
                moved.append((worker, WorkerLost(worker.worker, Cause.MOVED, why, False, None, now_s)))
        for worker, _ in moved:
            roster.mark_lost(worker, gone=False)
        return moved
