"""The controller's stores that outlive a generation: the start-up record, and the store of the job."""

from __future__ import annotations

from pathlib import Path

from keepstep.controller.jobstore import PREFIX, JobStore
from keepstep.controller.startup import StartUpRecord
from keepstep.protocol.messages import StoreAnswered, StoreRequested
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.protocol.recovery.scripts.startup import OPERATIONS
from keepstep.trace.record import runfolder


class ControllerStores:
    """What the controller stores for the workers, in memory or in files of a run folder."""

    def __init__(self, folder: Path | None = None, *, is_durable: bool = False) -> None:
        """Args:
        folder: of a controller that may be started again; read now.
        is_durable: what was written survives the machine too, as for `keepstep.trace.record.journal.Journal`.
        """
        start_up, store = (None, None) if folder is None else (folder / runfolder.START_UP, folder / runfolder.STORE)
        self._start_up = StartUpRecord(start_up, is_durable=is_durable)
        self._store = JobStore(store, is_durable=is_durable)

    def request(self, request: StoreRequested, job: RecoveryMachine) -> list[StoreAnswered] | None:
        """Carries out one request of a worker; None where it is for another place.

        Raises:
            RemoteProtocolError: it has no meaning.
        """
        if request.operation.startswith(PREFIX):
            return [] if job.roster.workers[request.worker].lost else self._store.request(request)
        if request.operation in OPERATIONS:
            return self._start_up.request(request, job.generation)
        return None

    def settle(self, job: RecoveryMachine) -> list[StoreAnswered]:
        """After every event, and before any answer is transmitted: returns answers to those who have waited for it.

        Raises:
            OSError: what has changed cannot be written.
        """
        if self._start_up.starts_over(job.stage, job.generation):
            self._store.restart()
        answers = self._store.settle(
            job.stage, job.generation, job.awaited, lambda worker: job.roster.workers[worker].lost
        )
        self._store.flush()
        return answers + self._start_up.settle(is_complete=job.membership is not None)  # known when all are ready

    def close(self) -> None:
        """Gives up its files."""
        self._store.close()
