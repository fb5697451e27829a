"""The oracle's check of silence: processes and nodes that may go on are not given up if the state is lost with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol.controller import RECENT_SHARE
from keepstep.protocol.deadlines import LEASE_S
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.suspicion import TOGETHER_S
from keepstep.sim.cluster.values import INCOMPLETE
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World

FAULTS = frozenset({"stop", "deadlock", "slow", "suspend"})
"""Faults that leave a process alive, with its copy of the state."""
ROUNDING_S = 1e-6
NEWS_S = RECENT_SHARE * LEASE_S
"""The controller need not know of a death so recent."""
SHORTLY_S = 0.5
BEFORE_S = 5.0
"""A process may have made no progress for so long before a fault silenced it: a phase, or a wait for others."""


def equal_in_doubt(holders: Sequence[SimulatedProcess]) -> list[SimulatedProcess]:
    """Returns the processes whose copies are in doubt and all equal, at least two of a shard."""
    doubted: dict[str | None, list[SimulatedProcess]] = {}
    for worker in holders:
        if worker.is_in_doubt:
            doubted.setdefault(worker.shard, []).append(worker)
    equal = (held for held in doubted.values() if len(held) > 1 and len({each.parameters for each in held}) == 1)
    return [worker for held in equal for worker in held]


class SilenceWatch:
    """Watches one run's silent processes and nodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s: dict[int, float] = {}
        """process -> when it fell silent."""
        self._ordered: set[int] = set()
        """Processes that the controller has ordered to be killed."""
        self.is_rescue = False
        """Whether a rank has saved its state, because the job cannot go on."""

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
        if self._is_unchecked() or not self._reach(worker) or self._fell_with_others(worker):
            return

        def counts(other: SimulatedProcess) -> bool:
            is_there = other is not worker and not self._world.oracle.is_unreachable(other)
            return is_there and not (other.is_stuck or self._is_silent(other))

        if self._has_common_step(counts, lambda _: False):
            raise ViolationError(Check.STUCK, f"{worker} is silent, others hold its state, and the job waits for it")

    def is_alone(self, worker: SimulatedProcess) -> bool:
        """Returns whether a process is stopped past its deadline, and no other one is that the controller hears of."""
        now_s = self._world.schedule.now_s
        lasts_s = now_s - self._since_s.get(worker.process, now_s) + BEFORE_S
        stopped = [other for other in self._world.rank_holders() if other.is_stopped]
        heard = [other for other in stopped if not self._world.oracle.is_unreachable(other)]
        return heard == [worker] and lasts_s >= self._world.layout.settings.deadlines.hang_after_s

    def _fell_with_others(self, worker: SimulatedProcess) -> bool:
        """Returns whether another process was silent with this one until now, perhaps since the same time.

        That is the time when each fell silent, or when ranks were last ordered to stop, from which all count as late.
        """
        now_s, since_s = self._world.schedule.now_s, self._since_s[worker.process]
        lately_s = now_s - self._world.layout.settings.deadlines.hang_after_s - BEFORE_S
        is_stopped = self._world.controller.machine.job.stage is not Stage.TRAINING
        for process, other_s in self._since_s.items():
            other = self._world.workers[process]
            is_or_was = other.is_stuck or self._is_silent(other) if other.is_alive else other.died_s > lately_s
            is_near = abs(other_s - since_s) <= TOGETHER_S + BEFORE_S or other.tag == worker.tag
            if other is not worker and is_or_was and (is_near or is_stopped):
                return True
        return False

    def evicted(self, node: str, silent_s: float) -> None:
        """Checks the eviction of a node from which the controller has heard nothing for a time."""
        deadlines = self._world.layout.settings.deadlines
        self._check_alone(node, deadlines.isolated_s)
        least_s = deadlines.isolated_s if self._world.checkpoints() else deadlines.long_s
        if silent_s + ROUNDING_S >= least_s:
            return
        self._check(
            lambda other: other.node.name == node,
            lambda other: other.node.is_read and other.node.name != node,
            f"{node}, silent for {silent_s:.2f} s, is evicted",
        )

    def _check_alone(self, node: str, isolated_s: float) -> None:
        """Checks that a node which is evicted did not fall silent with half of the others a short time ago."""
        now_s, connected = self._world.schedule.now_s, self._world.controller.machine.connections
        silent_s = {name: self._world.oracle.silent_for_s(name) for name in {*connected, node}}
        silent = [name for name, lasts_s in silent_s.items() if lasts_s >= LEASE_S]
        are_many = len(silent) >= max(2, len(silent_s) / 2)
        if are_many and min(silent_s[name] for name in silent) < isolated_s - SHORTLY_S:
            raise ViolationError(Check.HEALTHY_FENCED, f"{node} is evicted at {now_s:.2f} s, and silent with {silent}")

    def _is_unchecked(self) -> bool:
        """Returns whether the job may lose state now, because it has none yet, or ends."""
        oracle = self._world.oracle
        is_over = self.is_rescue or oracle.finished_ranks or oracle.drain.is_asked or oracle.is_excused
        return bool(not oracle.has_trained or is_over)

    def _is_silent(self, worker: SimulatedProcess) -> bool:
        """Returns whether a process is silent, and so long that the controller must know.

        The controller cannot know of a process that hangs in a wait for others.
        """
        deadlines, now_s = self._world.layout.settings.deadlines, self._world.schedule.now_s
        known_s = now_s - deadlines.hang_after_s - deadlines.together_s - 1.0
        look = worker.look()
        hangs = worker.is_stuck and not (look.waiting or look.in_collective)
        is_silent = worker.is_stopped or hangs or worker.slowness > 1.0
        return is_silent and self._since_s.get(worker.process, now_s) < known_s

    def _reach(self, worker: SimulatedProcess) -> set[int]:
        """Returns the steps to which a live process can bring its state."""
        held, steps = worker.parameters, worker.machine.steps
        is_torn = INCOMPLETE in held or worker.is_in_doubt
        if worker.process in self._ordered or is_torn or steps.phase is Phase.STARTING:
            return set()
        is_synced = steps.phase in (Phase.SYNCED, Phase.OPTIMIZER) and steps.step == len(held)
        return {len(held), len(held) + is_synced}

    def _has_common_step(
        self,
        counts: Callable[[SimulatedProcess], bool],
        is_read: Callable[[SimulatedProcess], bool],
        least_step: int = 0,
    ) -> bool:
        """Returns whether all shards reach a common step, by live copies and snapshots.

        Args:
            counts: whether the copy of a process counts.
            is_read: whether the snapshots in a process's memory count.
            least_step: the least step that counts. Fresh ranks are at step 0, too.
        """
        reached = self._world.oracle.snapshots.steps_of(is_read)
        holders = [worker for worker in self._world.rank_holders() if worker.shard is not None and counts(worker)]
        for worker in holders:
            reached[str(worker.shard)] |= self._reach(worker)
        for doubted in equal_in_doubt([each for each in holders if each.process not in self._ordered]):
            reached[str(doubted.shard)].add(len(doubted.parameters))
        return max(set.intersection(*reached.values()), default=-1) >= least_step

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
        oracle, now_s = self._world.oracle, self._world.schedule.now_s
        died_s = (each.died_s for each in self._world.workers.values() if each.machine.rank is not None)
        if self._is_unchecked() or any(now_s - NEWS_S < at_s <= now_s for at_s in died_s):
            return

        def is_there(worker: SimulatedProcess) -> bool:
            return not oracle.is_unreachable(worker)

        def is_heard(worker: SimulatedProcess) -> bool:
            return not oracle.is_silent(worker.node.name)

        before = self._has_common_step(
            lambda worker: is_lost(worker) or (is_there(worker) and not self._is_silent(worker)),
            lambda worker: worker.node.is_read and is_there(worker),
            least_step=1,
        )
        after = self._has_common_step(
            lambda worker: not is_lost(worker) and is_heard(worker) and not self._is_silent(worker),
            lambda worker: is_read(worker) and is_heard(worker),
        )
        if before and not after:
            raise ViolationError(Check.LAST_COPY, f"{what}, and the last copy of a shard is lost with it")
