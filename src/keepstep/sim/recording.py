"""Writes a simulated job into a run's folder, like a real job, so that every view of a run can show it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from keepstep.protocol.controller import JournalEntry
from keepstep.protocol.messages import PhasesObserved, Tag
from keepstep.protocol.recovery import RecoverySettings
from keepstep.shared.tagpage import MOMENT_INDEX, PHASE_INDEX, SnapshotMoment
from keepstep.trace.record import runfolder
from keepstep.trace.record.phaselog import NO_RANK, PHASE_DTYPE
from keepstep.trace.record.recorder import Recorder

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess

SNAPSHOT_BYTES = 1 << 20
"""The size that is recorded for each simulated snapshot."""
GATHER_S = 0.2
"""Interval, in virtual time, at which phases are written, as an agent sends them."""


class Recording:
    """The folder of one simulated run. Its clock is the world's: it starts at 0."""

    def __init__(self, folder: Path, what: str, settings: RecoverySettings) -> None:
        """Args:
        folder: an empty folder, or a path to create.
        what: recorded in place of a real job's command.
        settings: the settings of the job.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        info = runfolder.new_run(("simulated:", what), "simulated", settings)
        self._info = msgspec.structs.replace(info, started_ns=0)
        self._tags: dict[int, Tag] = {}
        self._pending: dict[str, list[tuple[int, int, int, int, int, int, int]]] = {}
        self._gathered_s = 0.0
        self._now_s = 0.0

    def __enter__(self) -> Recording:
        runfolder.begin(self._folder, self._info)
        self._recorder = Recorder(self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gather()
        self._recorder.__exit__(kind, error, trace)

    def shown(self, worker: SimulatedProcess) -> None:
        """Records a worker's tag, if it has changed."""
        if self._tags.get(worker.process) == worker.tag:
            return
        self._tags[worker.process], self._now_s = worker.tag, worker.world.schedule.now_s
        if self._now_s >= self._gathered_s + GATHER_S:
            self._gather()
        tag = worker.tag
        self._record(worker, round(worker.entered_s * 1e9), tag.step, tag.generation, PHASE_INDEX[tag.phase])

    def moment(self, worker: SimulatedProcess, moment: SnapshotMoment, step: int, now_s: float) -> None:
        """Records an event of a worker's snapshot."""
        self._now_s = now_s
        self._record(worker, SNAPSHOT_BYTES, step, worker.machine.generation, MOMENT_INDEX[moment])

    def _record(self, worker: SimulatedProcess, word: int, step: int, generation: int, kind: int) -> None:
        rank = NO_RANK if worker.machine.rank is None else worker.machine.rank
        record = (round(self._now_s * 1e9), word, step, generation, worker.number, rank, kind)
        self._pending.setdefault(worker.node.name, []).append(record)

    def decided(self, entry: JournalEntry) -> None:
        """Records an entry of the controller's journal."""
        self._gather()
        self._recorder.decided([entry])

    def ended(self, exit_code: int, reason: str, at_s: float) -> None:
        """Records the end of the job."""
        self._gather()
        runfolder.end(self._folder, self._info, exit_code, reason, round(at_s * 1e9))

    def _gather(self) -> None:
        self._gathered_s = self._now_s
        for node, changes in self._pending.items():
            self._recorder.observed(PhasesObserved(node, 0, np.array(changes, PHASE_DTYPE).tobytes()))
        self._pending.clear()
