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
        folder: run folder of a controller that may be restarted, whose files are read now; None: in memory only.
        is_durable: whether the files survive a crash of the machine, as for `keepstep.trace.record.journal.Journal`.

        Raises:
            ConfigurationError: a file is not one that this version writes.
        """
        start_up, store = (None, None) if folder is None else (folder / runfolder.START_UP, folder / runfolder.STORE)
        self._start_up = StartUpRecord(start_up, is_durable=is_durable)
        self._store = JobStore(store, is_durable=is_durable)

    def request(self, request: StoreRequested, job: RecoveryMachine) -> list[StoreAnswered] | None:
        """Executes a worker's request. Returns answers to send after `settle`; None if it is for the rendezvous.

        Raises:
            RemoteProtocolError: the request is invalid.
        """
        if request.operation.startswith(PREFIX):
            return [] if job.roster.workers[request.worker].lost else self._store.request(request)
        if request.operation in OPERATIONS:
            return self._start_up.request(request, job.generation)
        return None

    def settle(self, job: RecoveryMachine) -> list[StoreAnswered]:
        """Writes all changes, and returns answers to waiting requests. Runs after every event, before answers are sent.

        Raises:
            OSError: another controller has taken a file over.
        """
        if self._start_up.starts_over(job.stage, job.generation):
            self._store.restart()
        answers = self._store.settle(
            job.stage, job.generation, job.awaited, lambda worker: job.roster.workers[worker].lost
        )
        self._store.flush()
        return answers + self._start_up.settle(is_complete=job.membership is not None)  # known when all are ready

    @property
    def error(self) -> OSError | None:
        """Why a file was given up, so that a restarted controller would lack something; None if none was."""
        return self._start_up.error or self._store.error

    def close(self) -> None:
        """Closes the files."""
        self._start_up.close()
        self._store.close()
