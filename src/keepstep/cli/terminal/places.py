"""The current position of every rank of a run: the lines of `keepstep top`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.shared.tagpage import PHASES
from keepstep.trace.record.phaselog import PhaseArray
from keepstep.trace.timeline.run import News, Run
from keepstep.trace.timeline.scene import SceneSpan
from keepstep.trace.timeline.stragglers import Straggler

WORDS = {Phase.UPDATED: "between steps"}
"""Phases that the screen shows under another name."""
LOST, DONE = "lost", "done"
BEHIND_STEPS = 2
"""All ranks of a job are in the same step or in two consecutive ones. A rank this many steps behind the first one has
stalled."""


@dataclasses.dataclass(slots=True)
class ScreenPlace:
    """The current position of one rank."""

    rank: int
    state: str
    """A phase, a part of a recovery, `LOST` or `DONE`."""
    step: int | None
    worker: Worker | None
    stragglings: list[Straggler] = dataclasses.field(default_factory=list)
    is_behind: bool = False
    shard: str = ""
    """Number of its shard, and a bracket around the ranks that hold it. Empty if all ranks hold the same shard."""
    is_fresh: bool = False
    """Whether its worker took the rank in the current recovery."""

    @property
    def node(self) -> str:
        """The node of its current or last worker."""
        return "-" if self.worker is None else self.worker.node

    @property
    def trouble(self) -> int:
        """How urgently a user should look at it; 0: it works normally."""
        if self.state == LOST:
            return 4
        if self.is_behind:
            return 3
        return 2 if self.stragglings else int(self.is_fresh)


class Places:
    """Keeps the position of every rank up to date with the news of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: dict[int, tuple[str, int]] = {}
        """worker -> its phase and step."""
        self._workers: dict[int, Worker] = {}
        """rank -> its current or last worker."""

    def take(self, news: News) -> None:
        """Processes the news of a poll."""
        if len(news.changes):
            self._note(news.changes)
        if news.has_decided:
            self._workers = {}
            for worker in self._run.job.roster.workers.values():
                if worker.rank is not None:
                    before = self._workers.get(worker.rank)
                    if before is None or before.lost or not worker.lost:
                        self._workers[worker.rank] = worker

    def _note(self, changes: PhaseArray) -> None:
        newest = changes[np.argsort(changes["at_ns"], kind="stable")][::-1]
        workers, first = np.unique(newest["worker"], return_index=True)
        rows = newest[first]
        for worker, phase, step in zip(workers.tolist(), rows["phase"].tolist(), rows["step"].tolist(), strict=True):
            name = PHASES[phase]
            self._last[worker] = (WORDS.get(name, str(name)), step)

    def phase_of(self, worker: int) -> str:
        """Returns the phase of a worker or spare."""
        return self._last.get(worker, (str(Phase.STARTING), -1))[0]

    def all(self) -> list[ScreenPlace]:
        """Returns every rank, sorted by number, or by shard if ranks hold different shards."""
        job = self._run.job
        spans = self._open_spans()
        stragglings: dict[int, list[Straggler]] = {}
        for each in self._run.stragglers.found():
            stragglings.setdefault(each.rank, []).append(each)
        places = []
        for rank in range(job.settings.world_size):
            worker = self._workers.get(rank)
            phase, step = self._last.get(-1 if worker is None else worker.worker, (str(Phase.STARTING), -1))
            place = ScreenPlace(rank, phase, step if step >= 0 else None, worker, stragglings.get(rank, []))
            if worker is not None and worker.lost:
                place.state = LOST
            elif worker is not None and worker.done:
                place.state = DONE
            elif rank in spans:
                place.state = str(spans[rank].kind)
            place.is_fresh = rank in spans and rank in self._run.scenes[-1].replacements
            places.append(place)
        _mark_those_behind(places)
        return _by_shard(places, self._run.shards)

    def _open_spans(self) -> dict[int, SceneSpan]:
        """Returns the open span of each rank in the current recovery."""
        scenes = self._run.scenes
        if not scenes or self._run.job.stage not in (Stage.STOPPING, Stage.RECOVERING):
            return {}
        return {span.rank: span for span in scenes[-1].spans() if span.end_s is None}


def _by_shard(places: list[ScreenPlace], shards: Sequence[int]) -> list[ScreenPlace]:
    if not shards:
        return places
    for shard in dict.fromkeys(shards):
        replicas = [place for place in places if shards[place.rank] == shard]
        for place in replicas:
            place.shard = "│"
        replicas[-1].shard = "└"
        replicas[0].shard = f"{shard} ┌" if len(replicas) > 1 else f"{shard}  "
    return sorted(places, key=lambda place: (shards[place.rank], place.rank))


def _mark_those_behind(places: Iterable[ScreenPlace]) -> None:
    steps = [place.step for place in places if place.step is not None]
    for place in places:
        place.is_behind = place.step is not None and place.state != DONE and place.step <= max(steps) - BEHIND_STEPS
