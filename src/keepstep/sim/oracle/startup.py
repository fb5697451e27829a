"""The oracle's model of start-ups: the last one, and what the ranks exchanged in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World


class StartUpWatch:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cohort = 0
        """The number of the newest one that has begun to build."""
        self._kept: dict[str, bytes] = {}
        """What its ranks know to be kept, by name."""
        self._ready: set[int] = set()
        """Its ranks that have handed over all they had."""

    def begins(self, worker: SimulatedProcess) -> None:
        """A rank that is connected with all others begins to build."""
        assert worker.cohort is not None
        if worker.cohort > self._cohort:
            self._cohort, self._kept, self._ready = worker.cohort, {}, set()

    def has_kept(self, worker: SimulatedProcess, request: StoreRequested) -> None:
        """A rank was told that a value of it is kept."""
        if self._is_of_newest(worker):
            self._kept[request.keys[0]] = request.value

    def stands_ready(self, worker: SimulatedProcess) -> None:
        """A rank has handed over all it had, and stands at its first step."""
        if self._is_of_newest(worker):
            assert worker.machine.rank is not None
            self._ready.add(worker.machine.rank)

    def _is_of_newest(self, worker: SimulatedProcess) -> bool:
        return worker.cohort is not None and worker.cohort == self._cohort

    def is_given(self, name: str, answer: StoreAnswered) -> None:
        """The controller answers a replacement that asks for what was kept under a name.

        Raises:
            ViolationError: it is something else than the ranks exchanged, or comes before they have all exchanged it.
        """
        if len(self._ready) < self._world.layout.world_size:
            raise ViolationError(
                Check.START_UP,
                f"worker {answer.worker} is given {answer.values} as {name!r}, and only the ranks "
                f"{sorted(self._ready)} are ready in start-up {self._cohort}",
            )
        right = (self._kept[name],) if name in self._kept else ()
        if answer.values != right:
            raise ViolationError(
                Check.START_UP,
                f"worker {answer.worker} is given {answer.values} as {name!r}, and start-up {self._cohort} had {right}",
            )
