"""Writes the files of a run's folder while the job runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.messages import PhasesObserved, Stop, WeightsObserved
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import Journal
from keepstep.trace.record.phaselog import PhaseLog, records_of
from keepstep.trace.weights.publications import Publications

Listener = Callable[[list[JournalEntry]], None]
"""Called with entries right after they were written to the journal."""


class Recorder:
    """Writes the journal, the log of phases and the state of published weights.

    Where one of them cannot be written any more, it says so, and the job continues.
    """

    def __init__(
        self,
        folder: Path,
        listener: Listener | None = None,
        *,
        is_durable: bool = False,
        is_continuable: bool = False,
    ) -> None:
        """Args:
        folder: the folder of the run.
        listener: called with entries that were written.
        is_durable: see `Journal`.
        is_continuable: whether a restarted controller would go on from the journal.
        """
        self._is_continuable = is_continuable
        self._is_given_up = False
        self._listener = listener
        self._journal = Journal(folder / runfolder.JOURNAL, is_durable=is_durable)
        self._folder = folder
        self._publications = Publications.read(folder / runfolder.WEIGHTS)
        self._is_shown = True
        self._phases: PhaseLog | None = None
        try:
            self._phases = PhaseLog(folder / runfolder.PHASES)
        except OSError as error:
            self._give_up_phases(error)

    def decided(self, entries: list[JournalEntry]) -> None:
        """Writes entries to the journal, if it can still be written. Then it calls the listener."""
        self._journal.write(entries)
        if self._journal.error is not None:
            self.give_up(self._journal.error)
        if self._phases is not None and any(isinstance(order, Stop) for e in entries for _, order, _ in e.orders):
            self._phases.mark()
        if self._listener is not None:
            try:
                self._listener(entries)
            except Exception as error:  # no error of a listener may end the job
                self._listener = None
                print(f"keepstep: a listener failed and gets no more events: {error!r}", file=sys.stderr, flush=True)

    def give_up(self, error: OSError) -> None:
        """Ends the record of the run. No controller can go on from it."""
        if not self._is_given_up:
            self._is_given_up = True
            self._journal.give_up(error)
            what = "; the controller could not be started again" if self._is_continuable else ""
            text = f"the run is no longer recorded, training continues{what}: {error}"
            print(f"keepstep: {text}", file=sys.stderr, flush=True)

    def observed(self, phases: PhasesObserved) -> None:
        """Writes phase changes of a node's workers to the log.

        Raises:
            RemoteProtocolError: the message does not contain valid records.
        """
        records_of(phases)
        if self._phases is not None:
            try:
                self._phases.write(phases)
            except OSError as error:
                self._give_up_phases(error)

    def published(self, node: str, news: WeightsObserved) -> None:
        """Processes a rank's report on the weights that it publishes. `show_weights` writes the result."""
        self._publications.take(node, news)
        self._is_shown = False

    def show_weights(self) -> None:
        """Writes the state of published weights to the folder, if it has changed."""
        if self._is_shown:
            return
        try:
            self._publications.write(self._folder / runfolder.WEIGHTS)
        except OSError as error:
            print(f"keepstep: published weights are not shown; training continues: {error}", file=sys.stderr)
        self._is_shown = True

    def _give_up_phases(self, error: OSError) -> None:
        print(f"keepstep: phases are no longer recorded, training continues: {error}", file=sys.stderr, flush=True)
        if self._phases is not None:
            self._phases.close()
            self._phases = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.show_weights()
        self._journal.close()
        if self._phases is not None:
            self._phases.close()
