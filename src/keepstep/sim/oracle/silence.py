"""The oracle's check of silence: processes and nodes that may go on are not given up if the state is lost with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.sim.cluster.values import INCOMPLETE
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World

FAULTS = frozenset({"stop", "deadlock", "slow", "suspend"})
"""Faults that leave a process alive, with its copy of the state."""
ROUNDING_S = 1e-6
BEFORE_S = 5.0
"""A process may have made no progress for so long before a fault silenced it: a phase, or a wait for others."""


class SilenceWatch:
    """Watches one run's silent processes and nodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s: dict[int, float] = {}
        """process -> when it fell silent."""
        self._ordered: set[int] = set()
        """Processes that the controller has ordered to be killed."""

    def begins(self, worker: SimulatedProcess) -> None:
        """Records a process that falls silent."""
        self._since_s[worker.process] = self._world.schedule.now_s

    def holds(self, worker: SimulatedProcess) -> bool:
        """Returns whether a process lives, although a fault has hit it: it is only silent, or has gone on."""
        return worker.is_alive and worker.process in self._since_s

    def fenced(self, worker: SimulatedProcess) -> None:
        """Checks the order to kill a process. From then on its copy does not count, even if its agent gets it late."""
        self._check_fence(worker)
        self._ordered.add(worker.process)

    def _check_fence(self, worker: SimulatedProcess) -> None:
        if not self.holds(worker) or self._world.oracle.has_other_fault(worker):
            return
        deadlines, now_s = self._world.layout.settings.deadlines, self._world.schedule.now_s
        lasts_s = now_s - self._since_s[worker.process]
        if lasts_s + BEFORE_S >= deadlines.long_s and self._world.checkpoints():
            return
        self._check(
            lambda other: other is worker,
            lambda other: other.node.is_read,
            f"{worker}, silent for {lasts_s:.2f} s, is fenced",
        )

    def put_down(self, worker: SimulatedProcess) -> None:
        """Checks a process that an operator kills after a long silence: the job must not have waited for it in vain."""
        oracle, shards = self._world.oracle, set(self._world.layout.shards)
        if not oracle.has_trained or oracle.finished_ranks or oracle.drain.is_asked or oracle.is_excused:
            return
        complete = self._complete()
        others = [each for each in complete if each is not worker and not oracle.is_unreachable(each)]
        is_replicated = {each.shard for each in others if not self._must_be_known(each)} == shards
        if worker in complete and is_replicated:
            raise ViolationError(Check.STUCK, f"{worker} is silent, others hold its state, and the job waits for it")

    def evicted(self, node: str, silent_s: float) -> None:
        """Checks the eviction of a node from which the controller has heard nothing for a time."""
        deadlines = self._world.layout.settings.deadlines
        least_s = deadlines.isolated_s if self._world.checkpoints() else deadlines.long_s
        if silent_s + ROUNDING_S >= least_s:
            return
        self._check(
            lambda other: other.node.name == node,
            lambda other: other.node.is_read and other.node.name != node,
            f"{node}, silent for {silent_s:.2f} s, is evicted",
        )

    def _must_be_known(self, worker: SimulatedProcess) -> bool:
        """Returns whether a process is silent, and so long that the controller must know."""
        deadlines, now_s = self._world.layout.settings.deadlines, self._world.schedule.now_s
        known_s = now_s - deadlines.hang_after_s - deadlines.together_s - 1.0
        is_silent = worker.is_stopped or worker.is_stuck or worker.slowness > 1.0
        return is_silent and self._since_s.get(worker.process, now_s) < known_s

    def _complete(self) -> list[SimulatedProcess]:
        """Returns the live processes that hold a rank's state, not older than the step that the ranks are in."""
        least = max(1, self._world.oracle.furthest)
        live = (each for each in self._world.rank_holders() if each.process not in self._ordered)
        return [each for each in live if INCOMPLETE not in each.parameters and len(each.parameters) >= least]

    def _check(
        self,
        is_lost: Callable[[SimulatedProcess], bool],
        is_read: Callable[[SimulatedProcess], bool],
        what: str,
    ) -> None:
        """Checks that the state is not lost by a decision, unless it was lost before.

        Args:
            is_lost: whether a process is given up.
            is_read: whether the snapshots in a process's memory count after the decision.
            what: the decision.
        """
        oracle, shards = self._world.oracle, set(self._world.layout.shards)

        def stays(worker: SimulatedProcess) -> bool:
            return not is_lost(worker) and not self._must_be_known(worker)

        if not oracle.has_trained or oracle.finished_ranks or oracle.drain.is_asked or oracle.is_excused:
            return
        complete = self._complete()
        holders = [worker for worker in complete if is_lost(worker) or not oracle.is_unreachable(worker)]
        if {worker.shard for worker in holders} != shards or {each.shard for each in complete if stays(each)} == shards:
            return
        if not any(is_lost(worker) for worker in holders):
            return  # they hold nothing
        now_s = self._world.schedule.now_s
        if oracle.snapshots.newest(lambda worker: is_read(worker) and not oracle.is_unreachable(worker), now_s) is None:
            raise ViolationError(Check.LAST_COPY, f"{what}, and the last copy of a shard is lost with it")
