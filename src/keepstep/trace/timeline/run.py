"""The current state of a run, read from its folder: the common source of all views."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keepstep.errors import ConfigurationError
from keepstep.protocol.controller import JournalEntry, replay
from keepstep.protocol.recovery import RecoveryMachine
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import JournalTail
from keepstep.trace.record.phaselog import PHASE_DTYPE, PhaseArray, moments_in, phases_in
from keepstep.trace.timeline.events import ControlEvent, Teller
from keepstep.trace.timeline.goodput import Ledger
from keepstep.trace.timeline.history import PhaseHistory
from keepstep.trace.timeline.lives import Lives
from keepstep.trace.timeline.pace import DURATION_DTYPE, DurationArray, Durations, Pace, SnapshotPace
from keepstep.trace.timeline.scene import Scene, SceneStage
from keepstep.trace.timeline.stragglers import StragglerWatch
from keepstep.trace.weights.publications import Publications


@dataclasses.dataclass(slots=True)
class News:
    """The news of one poll."""

    changes: PhaseArray
    moments: PhaseArray
    durations: DurationArray
    events: list[ControlEvent]
    scenes: dict[int, Scene]
    """Number -> recovery, for those that have changed."""
    has_decided: bool
    """Whether the journal has new entries."""
    has_published: bool = False
    """Whether there is news of published weights."""

    @property
    def is_any(self) -> bool:
        """Whether anything is new."""
        return bool(len(self.changes) or len(self.moments)) or self.has_decided


class Run:
    """Follows the folder of a run, while the job runs and afterwards.

    It replays the events of the journal with the controller's machine, and compares the orders with those of the
    journal. So the views show the real decisions, or none.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the run in ``folder``, or in its subfolder with the newest run. `poll` reads it.

        Raises:
            ConfigurationError: there is no run.
        """
        self.folder = runfolder.newest_run(folder)
        self.info = runfolder.read_info(self.folder)
        self.job = RecoveryMachine(self.info.settings)
        self.history = PhaseHistory(self.folder / runfolder.PHASES)
        self.pace = Pace()
        self.snapshots = SnapshotPace()
        self.publications = Publications()
        self._weights_changed_ns = 0
        self.stragglers = StragglerWatch(self.info.settings.world_size)
        self.events: list[ControlEvent] = []
        self._journal = JournalTail(self.folder / runfolder.JOURNAL)
        self._num_entries = 0
        self._durations = Durations()
        self._stage = SceneStage(self.job)
        self._teller = Teller(self.job)
        self.lives = Lives()
        self.ledger = Ledger(self._stage.scenes, self.pace)
        self._last_s = 0.0
        self._info_changed_ns = 0
        self.is_replaced = False
        """Whether another run has begun in the folder. Then this run's files were moved aside, and no news follow."""

    @property
    def shards(self) -> list[int]:
        """Shard number of each rank. Empty if all ranks hold the same shard, or before the membership is known."""
        membership = self.job.membership
        return [] if membership is None or len(membership.shards) == 1 else list(membership.shard_numbers)

    @property
    def scenes(self) -> list[Scene]:
        """Every recovery, oldest first."""
        return self._stage.scenes

    def poll(self) -> News:
        """Reads everything that was written since the last call.

        Raises:
            ConfigurationError: the journal cannot be read, or this version replays it to other orders.
            RemoteProtocolError: the phase log cannot be read.
        """
        self._look_at_info()
        nothing = np.empty(0, PHASE_DTYPE)
        news = News(nothing, nothing, np.empty(0, DURATION_DTYPE), [], {}, False)
        if self._journal.path.exists() and not self.is_replaced:
            for entry in self._journal.read():
                self._live_through(entry, news)
        records = self.history.poll()
        news.changes, news.moments = phases_in(records), moments_in(records)
        if len(news.changes):
            news.durations = self._durations.take(news.changes)
            self.pace.take(news.changes, self.info.started_ns)
            self.stragglers.take(news.durations)
        self.snapshots.take(news.moments)
        news.has_published = self._look_at_weights()
        self.events += news.events
        return news

    def _look_at_info(self) -> None:
        try:
            changed_ns = (self.folder / runfolder.INFO).stat().st_mtime_ns
            if changed_ns == self._info_changed_ns:
                return
            info = runfolder.read_info(self.folder)
        except (OSError, ConfigurationError):
            return  # the controller is replacing it
        self._info_changed_ns = changed_ns
        if info.run == self.info.run:
            self.info = info
        else:
            self.is_replaced = True

    def _look_at_weights(self) -> bool:
        path = self.folder / runfolder.WEIGHTS
        try:
            changed_ns = path.stat().st_mtime_ns
        except OSError:
            return False
        if changed_ns == self._weights_changed_ns or self.is_replaced:
            return False
        self._weights_changed_ns, self.publications = changed_ns, Publications.read(path)
        return True

    def _live_through(self, entry: JournalEntry, news: News) -> None:
        self._stage.before()
        self._num_entries += 1
        try:
            replay(self.job, entry, self._num_entries)
        except ConfigurationError as error:
            raise ConfigurationError(runfolder.other_version(self.folder, self.info, error)) from error
        if self._stage.after(entry) and self.scenes:
            for scene in self.scenes[-2:]:  # the one before may just have been superseded
                news.scenes[scene.number] = scene
        news.events += self._teller.tell(entry)
        self.lives.take(entry)
        news.has_decided = True
        self._last_s = max(self._last_s, entry.at_s)

    @property
    def now_s(self) -> float:
        """The present time on the job's clock; the time of its end or last record if the job does not run."""
        if self.info.ended is not None:
            return self.info.ended.at_ns / 1e9
        if self.is_alive:
            return max(self._last_s, self.info.clock().now_s())
        return max(self._last_s, self.history.end_ns / 1e9)

    @property
    def is_alive(self) -> bool:
        """Whether the process of the job's launcher or controller still runs."""
        return self.info.ended is None and runfolder.is_occupied(self.folder)

    @property
    def goodput(self) -> float | None:
        """The share of the time since training began that recoveries have not cost; None before training."""
        return self.ledger.goodput(self.now_s)

    def close(self) -> None:
        """Closes the files."""
        self.history.close()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Run]:
    """Yields the run in a folder, read up to the present end.

    Raises:
        ConfigurationError: there is no run.
    """
    run = Run(folder)
    try:
        run.poll()
        yield run
    finally:
        run.close()
