"""The oracle's checks of drains: the request, the ranks' last steps, and the failures that may excuse a delay."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from keepstep.protocol.messages import EndJob
from keepstep.protocol.recovery.end.drain import HOLDING
from keepstep.protocol.worker import WorkerState
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World

LATE_S = 1.0
"""How long an order to end may take to arrive, if no fault disturbs it."""
SPARE_IS_WARM_S = 4.0
"""A spare that has run for this time is warm, and has taken over a rank that had to move, if no fault disturbs it."""
CALM_S = 1.0
"""The effects of a fault that ended this time ago are over, or a recovery is in progress."""


class DrainWatch:
    """Watches the drains of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked_s = math.inf
        self._was_calm = False
        self._troubled_until_s = 0.0
        self._node_asked: dict[str, tuple[float, bool]] = {}
        """node -> (when its drain was requested, whether all ranks trained undisturbed then)."""
        self._stood: dict[int, int] = {}
        """rank -> the step at which it was when the job ended there."""
        self._ended_well: set[int] = set()
        """The ranks whose script has ended well, as their agent knew before its node's grace period ended."""

    def troubled(self, lasts_s: float) -> None:
        """Records a fault that begins now and lasts for this time."""
        self._troubled_until_s = max(self._troubled_until_s, self._world.schedule.now_s + lasts_s)

    def asked(self, *, is_calm: bool) -> None:
        """Records the request to drain the job. ``is_calm``: all ranks train, and no recovery is in progress."""
        if not self.is_asked:
            self._asked_s = self._world.schedule.now_s
            self._was_calm = is_calm and self._troubled_until_s + CALM_S < self._asked_s

    def node_asked(self, node: str, *, is_calm: bool) -> None:
        """Records the request to drain a node. ``is_calm`` as for `asked`."""
        now_s = self._world.schedule.now_s
        self._node_asked[node] = now_s, is_calm and self._troubled_until_s + CALM_S < now_s

    def was_disturbed_since(self, at_s: float) -> bool:
        """Returns whether something may have kept ranks from moving since then: a fault, or a drain."""
        return self._troubled_until_s > at_s or self.is_asked or bool(self._node_asked)

    @property
    def leaving(self) -> Collection[str]:
        """The nodes whose drain was requested. Their processes may be killed."""
        return self._node_asked

    def node_departs(self, node: str) -> None:
        """Checks a node that leaves with its processes at the end of its grace period.

        Raises:
            ViolationError: spares of other nodes could have taken its ranks, and no other event has prevented it.
        """
        asked_s, was_calm = self._node_asked[node]
        layout, now_s = self._world.layout, self._world.schedule.now_s
        if not was_calm or self._troubled_until_s >= asked_s or self.is_asked or len(self._node_asked) > 1:
            return
        there = {worker.machine.rank for worker in self._world.rank_holders() if worker.node.name == node}
        elsewhere = {worker.shard for worker in self._world.rank_holders() if worker.node.name != node}
        spares = [
            spare
            for spare in self._world.spares()
            if spare.node.name != node
            and spare.machine.state is WorkerState.READY
            and spare.spawned_s + SPARE_IS_WARM_S < now_s
        ]
        can_move = {layout.shards[rank] for rank in there if rank is not None} <= elsewhere
        if there and can_move and len(spares) >= len(there) and len(self._world.oracle.finished_ranks) == 0:
            raise ViolationError(
                Check.DRAIN, f"{node} leaves with ranks {sorted(map(str, there))}, and spares are warm"
            )

    def ends_well(self, worker: SimulatedProcess) -> None:
        """Records that an agent has read the exit status of a process, whose script has ended well."""
        if worker.machine.rank in self._world.oracle.finished_ranks:
            assert worker.machine.rank is not None
            self._ended_well.add(worker.machine.rank)

    @property
    def loses_a_finished_job(self) -> bool:
        """Whether a failure of the job can only mean that a drained node has not reported the end of its last rank.

        Without a drained node, nothing excuses such a failure anyway. A loss of packets may delay the report for longer
        than the node may stay.
        """
        layout = self._world.layout
        asked_s = min((at_s for at_s, _ in self._node_asked.values()), default=-math.inf)
        is_undisturbed = self._troubled_until_s < asked_s and not layout.network.loss and not self.is_asked
        return is_undisturbed and len(self._ended_well) == layout.world_size

    def begins_step(self, worker: SimulatedProcess, step: int) -> None:
        """Checks that a rank may begin a step.

        Raises:
            ViolationError: the drain should have stopped the rank before.
        """
        if self._is_clear and self._world.schedule.now_s > self._asked_s + HOLDING * self._grace_s + LATE_S:
            raise ViolationError(
                Check.DRAIN, f"{worker} begins step {step}, and the job was to end at {self._asked_s:.3f} s"
            )

    @property
    def _is_clear(self) -> bool:
        """Whether a drain was requested, and no fault has disturbed it."""
        return self._was_calm and self._troubled_until_s < self._asked_s

    @property
    def _grace_s(self) -> float:
        return self._world.layout.settings.grace_s

    @property
    def is_asked(self) -> bool:
        """Whether a drain of the job was requested."""
        return self._asked_s < math.inf

    def stands(self, worker: SimulatedProcess, step: int) -> None:
        """Records the step at which a rank is when the job ends there."""
        assert worker.machine.rank is not None
        self._stood[worker.machine.rank] = step

    def wrong(self, order: EndJob) -> str | None:
        """Returns what is wrong with the end of a drained job; None if nothing is, or if a fault has disturbed it."""
        if not self._is_clear:
            return None
        layout, now_s = self._world.layout, self._world.schedule.now_s
        if now_s > self._asked_s + self._grace_s + LATE_S:
            return f"the job was to end at {self._asked_s:.3f} s, and did at {now_s:.3f} s"
        if len(self._world.oracle.finished_ranks) == layout.world_size:
            return None
        if now_s > self._asked_s + self._grace_s - LATE_S and not layout.network.loss:
            return "remaining processes were killed after the grace period, and nothing stood in its way"
        if len(self._stood) < layout.world_size:
            return f"of all ranks only {sorted(self._stood)} stood at the last step"
        if len(set(self._stood.values())) > 1:
            return f"the ranks stood at different steps: {self._stood}"
        step = self._stood[0]
        if layout.checkpoint_every is not None and step not in self._world.checkpoints():
            return f"the job ended at step {step}, of which there is no checkpoint"
        return None
