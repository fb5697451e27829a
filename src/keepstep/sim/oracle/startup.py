"""The oracle's model of the newest start-up: the values that its ranks have exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.sim.oracle.checks import Check, ViolationError

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World


class StartUpWatch:
    """Watches the start-ups of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cohort = 0
        """The number of the newest cohort that has begun to build."""
        self._kept: dict[str, bytes] = {}
        """Name -> value, for the values that the controller has confirmed to this cohort."""
        self._ready: set[int] = set()
        """The ranks of this cohort that have submitted all their values."""

    def begins(self, worker: SimulatedProcess) -> None:
        """Begins a new start-up, if the rank that begins to build is of a newer cohort."""
        assert worker.cohort is not None
        if worker.cohort > self._cohort:
            self._cohort, self._kept, self._ready = worker.cohort, {}, set()

    def has_kept(self, worker: SimulatedProcess, request: StoreRequested) -> None:
        """Records a value that the controller has confirmed to a rank."""
        if self._is_of_newest(worker):
            self._kept[request.keys[0]] = request.value

    def stands_ready(self, worker: SimulatedProcess) -> None:
        """Records that a rank has submitted all its values, and is at its first step."""
        if self._is_of_newest(worker):
            assert worker.machine.rank is not None
            self._ready.add(worker.machine.rank)

    def _is_of_newest(self, worker: SimulatedProcess) -> bool:
        return worker.cohort is not None and worker.cohort == self._cohort

    def is_given(self, name: str, answer: StoreAnswered) -> None:
        """Checks the controller's answer to a replacement that asks for the value of a name.

        Raises:
            ViolationError: the value is not the one that the ranks exchanged, or not all ranks have submitted theirs.
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
