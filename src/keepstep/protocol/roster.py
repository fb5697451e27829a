"""The controller's list of workers: who holds which rank, who is a spare, who is gone."""

from __future__ import annotations

import dataclasses

from keepstep.protocol.messages import SafePointReached, WorkerReady
from keepstep.protocol.topology import Placement, choose_spare


@dataclasses.dataclass(slots=True)
class Worker:
    """What the controller knows of one worker process."""

    worker: int
    node: str
    rank: int | None
    pid: int | None = None
    ready: WorkerReady | None = None
    """Its last word that it stands at its first step; None while it starts up."""
    awaits_rank: bool = False
    """A spare whose script can go no further without a rank."""
    lost: bool = False
    gone: bool = False
    """Its process no longer exists (a lost worker that is not gone must be fenced)."""
    done: bool = False
    safe: SafePointReached | None = None
    """Its safe point in the present generation."""
    groups_reset: bool = False
    recovered: bool = False
    finished: bool = False
    answered_rescue: bool = False
    rescued: str | None = None
    """Where it saved its shard."""
    rescue_error: str | None = None
    """Why it could not."""
    error: str | None = None

    def begin_generation(self) -> None:
        """Forgets what it reported in the generation before."""
        self.safe = None
        self.groups_reset = self.recovered = self.finished = False


@dataclasses.dataclass(slots=True)
class Roster:
    """All workers of the job, lost ones included until they are gone, and the process budget."""

    world_size: int
    max_starts: int | None
    """How many processes may be started in all, None for no bound."""
    workers: dict[int, Worker] = dataclasses.field(default_factory=dict)
    num_started: int = 0

    def add(self, node: str, rank: int | None) -> Worker:
        """Enters a worker that is about to be started."""
        worker = Worker(self.num_started, node, rank)
        self.workers[worker.worker] = worker
        self.num_started += 1
        return worker

    def may_start(self, num_processes: int = 1) -> bool:
        """Whether the budget allows so many more processes."""
        return self.max_starts is None or self.num_started + num_processes <= self.max_starts

    def live(self) -> list[Worker]:
        """Every worker that is not lost and not done."""
        return [worker for worker in self.workers.values() if not worker.lost and not worker.done]

    def holders(self) -> list[Worker]:
        """The live workers that hold a rank, in rank order."""
        return sorted(
            (worker for worker in self.live() if worker.rank is not None), key=lambda worker: worker.rank or 0
        )

    def spares(self) -> list[Worker]:
        """The live workers without a rank, warm or still starting."""
        return [worker for worker in self.live() if worker.rank is None]

    def missing_ranks(self) -> list[int]:
        """The ranks that no live worker holds."""
        held = {worker.rank for worker in self.holders()}
        return [rank for rank in range(self.world_size) if rank not in held]

    def replacements(self) -> dict[int, Worker] | None:
        """A spare for every missing rank, or None where there are too few.

        Those that stand at their first step come before those that only wait for a rank. Nothing is given out yet.
        """
        ready = {spare.worker: Placement(spare.node) for spare in self.spares() if spare.ready}
        waiting = {
            spare.worker: Placement(spare.node) for spare in self.spares() if spare.awaits_rank and not spare.ready
        }
        chosen: dict[int, Worker] = {}
        for rank in self.missing_ranks():
            pool = ready or waiting
            # One node is supported: where the lost rank was makes no difference yet.
            lost = next((worker.node for worker in self.workers.values() if worker.rank == rank), "")
            spare = choose_spare(Placement(lost), pool, node_at_fault=False)
            if spare is None:
                return None
            del pool[spare]
            chosen[rank] = self.workers[spare]
        return chosen

    def unfenced(self) -> list[Worker]:
        """The lost workers whose process may still exist."""
        return [worker for worker in self.workers.values() if worker.lost and not worker.gone]
