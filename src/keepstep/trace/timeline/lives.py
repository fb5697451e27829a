"""The lifetimes of a job's processes: start, ready for a rank, end."""

from __future__ import annotations

import dataclasses

from keepstep.protocol import messages as msg
from keepstep.protocol.controller import JournalEntry, ReportsReceived


@dataclasses.dataclass(slots=True)
class Life:
    """When the controller received reports of one worker's life, in seconds on the job's clock; None if it has not."""

    started_s: float | None = None
    warm_s: float | None = None
    """The worker waited at its first step, or at the line that needs its rank."""
    ended_s: float | None = None


class Lives:
    """The lives of all workers of the job, including ended ones."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def of(self, worker: int) -> Life:
        """Returns the life of a worker."""
        return self._lives.setdefault(worker, Life())

    def take(self, entry: JournalEntry) -> None:
        """Processes an entry of the journal."""
        if not isinstance(entry.event, ReportsReceived):
            return
        for report in entry.event.reports:
            match report:
                case msg.WorkerStarted(worker):
                    self.of(worker).started_s = entry.at_s
                case msg.WorkerReady() | msg.RankAwaited():
                    life = self.of(report.worker)
                    life.warm_s = life.warm_s or entry.at_s
                case msg.WorkerLost() | msg.WorkerEnded() | msg.WorkerDone() | msg.WorkerFenced():
                    life = self.of(report.worker)
                    life.ended_s = life.ended_s or entry.at_s
                case _:
                    pass
