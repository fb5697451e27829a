"""Hang detection of the agent's machine: decides from observations which workers are lost.

Only the progress of the *training* thread counts, never a heartbeat of another thread. Lack of progress is a fault only
if the worker does not wait for another one. A rank inside a collective waits for the rank that has not entered it, and
killing it would be a bug. If every rank of the node waits past its deadline, the agent reports the job as stalled. The
controller then stops all ranks, and the agent blames a rank that does not stop.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from keepstep.protocol.messages import Cause, JobStalled, Tag, WorkerLost
from keepstep.protocol.phases import Phase

WINDOW = 64
"""Number of recent durations kept for each phase. The deadline of the phase follows from the longest of them."""
MEASURED = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER})
"""The phases whose deadline follows from measured durations."""


def was_passed(before: Tag, after: Tag) -> bool:
    """Returns whether a measured phase has ended by itself, and was not undone or interrupted.

    Args:
        before: the tag in that phase.
        after: the next tag of the rank.
    """
    return before.phase in MEASURED and before.generation == after.generation and before.step <= after.step


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """An observation of a worker's page and process. ``stopped``: SIGSTOP holds the process."""

    tag: Tag
    progress: int
    waiting: bool
    in_collective: bool
    stopped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LivenessSettings:
    """Deadlines in seconds. With the defaults, a hang can be repaired within ``max(1 s, 3 x the phase)``."""

    floor_s: float = 0.75
    factor: float = 2.5
    """A phase may take ``max(floor_s, factor x its longest recent duration)``."""
    stopped_s: float = 0.3
    """How long SIGSTOP may hold a process. Short, because the operating system shows this state with certainty."""
    unknown_s: float = 120.0
    """Deadline of a phase without a measured duration, which may include compilation and lazy initialisation."""
    between_steps_s: float = 600.0
    """Deadline of the start-up and between two steps, where a script may evaluate and save for long."""
    recovery_s: float = 30.0
    """Deadline for connecting groups and moving state. Each sign of progress restarts it."""
    explain_s: float = 30.0
    """After this time without progress, the agent reports where ranks wait. Longer than most evaluations on a single
    rank, and short enough for a person who watches a hanging job."""
    blind_s: float = 0.5
    """If an agent has not observed for longer, it was paused itself, and cannot know which workers made progress."""


@dataclasses.dataclass(slots=True)
class _Watched:
    rank: int | None
    seen: Observation | None = None
    changed_s: float = 0.0
    measured_from_s: float = 0.0
    """Durations of phases that began earlier do not count: they include a recovery or a pause of the agent."""
    stopped_since_s: float | None = None
    stopping: bool = False
    safe: bool = False
    lost: bool = False
    builds: bool = False
    """Whether the worker is a spare whose script waits for the rank before its first step. Then the deadline of the
    start-up holds, not that of a recovery."""


class LivenessMachine:
    """Watches the workers of one node. Call `observe` for each worker, then `judge`, and report the verdicts."""

    def __init__(self, node: str, settings: LivenessSettings) -> None:
        self.node = node
        self.settings = settings
        self._workers: dict[int, _Watched] = {}
        self._durations: dict[Phase, deque[float]] = {phase: deque(maxlen=WINDOW) for phase in Phase}
        self._stalled_generation = -1
        self._looked_s: float | None = None
        self.is_initialised = False
        """Whether a worker has called `keepstep.init()`. Before that, pages show nothing, and there is no deadline."""

    def watch(self, worker: int, rank: int | None, now_s: float) -> None:
        """Begins to watch a started worker, or records the rank of a spare."""
        watched = self._workers.setdefault(worker, _Watched(rank, changed_s=now_s, measured_from_s=now_s))
        watched.rank = rank

    def forget(self, worker: int) -> None:
        """Ends the watch of a worker whose process is gone."""
        self._workers.pop(worker, None)

    def stopping(self, workers: tuple[int, ...], now_s: float) -> None:
        """Records an order to stop. From now on a collective does not excuse these workers, because it is broken."""
        for number in workers:
            if number in self._workers:
                watched = self._workers[number]
                watched.stopping, watched.safe, watched.changed_s = True, False, now_s

    def builds(self, worker: int, *, is_building: bool) -> None:
        """Records whether a spare's script waits for a rank during its start-up; False once it is at its first step."""
        if worker in self._workers:
            self._workers[worker].builds = is_building

    def safe(self, worker: int) -> None:
        """Records that the worker is at its safe point and waits for orders."""
        if worker in self._workers:
            self._workers[worker].safe = True

    def recovering(self, worker: int, now_s: float) -> None:
        """Records that the worker recovers: ``recovery_s`` is the deadline from now on."""
        if worker in self._workers:
            watched = self._workers[worker]
            watched.stopping = watched.safe = True
            watched.changed_s = now_s

    def resumed(self, now_s: float) -> None:
        """Records that training continues. A stall from now on is reported again."""
        self._stalled_generation = -1
        for watched in self._workers.values():
            watched.stopping = watched.safe = False
            watched.changed_s = watched.measured_from_s = now_s

    def observe(self, worker: int, look: Observation, now_s: float) -> None:
        """Records an observation of a worker's page and process."""
        self._discount_own_pause(now_s)
        watched = self._workers.get(worker)
        if watched is None or (watched.seen is not None and look == watched.seen):
            return
        before = watched.seen
        watched.seen = look
        if before is None or (before.tag, before.progress) != (look.tag, look.progress):
            watched.changed_s = now_s
        if not look.stopped:
            watched.stopped_since_s = None
        elif watched.stopped_since_s is None:
            watched.stopped_since_s = now_s

    def passed(self, worker: int, phase: Phase, began_s: float, ended_s: float) -> None:
        """Records the duration of a completed phase. Call it after `observe`, for the longest one of each phase.

        Args:
            worker: the worker whose page shows the phase.
            phase: a phase for which `was_passed` is true.
            began_s: when it began, on the clock of ``now_s``.
            ended_s: when it ended, on the same clock.
        """
        watched = self._workers.get(worker)
        if watched is not None and not watched.stopping and watched.measured_from_s <= began_s <= ended_s:
            self._durations[phase].append(ended_s - began_s)

    def deadline_s(self, worker: int) -> float:
        """Returns how long this worker may make no progress in its current phase, in seconds."""
        watched = self._workers[worker]
        phase = watched.seen.tag.phase if watched.seen else Phase.STARTING
        if phase is Phase.STARTING and not self.is_initialised:
            return math.inf
        if watched.stopping and watched.safe and not watched.builds:
            return self.settings.recovery_s
        if phase in (Phase.STARTING, Phase.UPDATED):
            return self.settings.between_steps_s
        known = self._durations[phase]
        return max(self.settings.floor_s, self.settings.factor * max(known)) if known else self.settings.unknown_s

    def judge(self, now_s: float) -> list[WorkerLost | JobStalled]:
        """Returns the lost workers. If all ranks of the node wait past their deadlines, and none is at fault, returns a
        `JobStalled` instead, once for each stall."""
        self._discount_own_pause(now_s)
        verdicts: list[WorkerLost | JobStalled] = []
        holders = [number for number, watched in self._workers.items() if watched.rank is not None]
        overdue = [number for number in holders if self._still_s(number, now_s) > self.deadline_s(number)]
        for number, watched in self._workers.items():
            if watched.lost or watched.seen is None:
                continue
            stopped_since_s = watched.stopped_since_s
            if stopped_since_s is not None and now_s - stopped_since_s > self.settings.stopped_s:
                verdicts.append(self._blame(number, Cause.STOPPED, "its process is stopped (SIGSTOP)", now_s))
            elif number in overdue and self._at_fault(watched):
                verdicts.append(self._blame(number, Cause.HANG, "no progress, and it waits for no other rank", now_s))
        if len(overdue) < len(holders):
            self._stalled_generation = -1
        elif not verdicts and holders:
            verdicts += self._stalled(holders)
        return verdicts

    def standing(self, least_s: float, now_s: float) -> list[tuple[int, Observation, float]]:
        """Returns the rank holders without progress for at least ``least_s``, except in recoveries.

        Returns:
            (worker, its last observation, seconds without progress).
        """
        return [
            (number, watched.seen, still_s)
            for number, watched in self._workers.items()
            if watched.rank is not None and watched.seen is not None and not (watched.stopping or watched.lost)
            if (still_s := self._still_s(number, now_s)) >= least_s
        ]

    def _discount_own_pause(self, now_s: float) -> None:
        """Extends all deadlines by the time in which the agent itself was paused, or by which its clock jumped."""
        before, self._looked_s = self._looked_s, now_s
        if before is None or abs(now_s - before) <= self.settings.blind_s:
            return
        gap_s = now_s - before
        for watched in self._workers.values():
            watched.changed_s += gap_s
            watched.measured_from_s = now_s
            if watched.stopped_since_s is not None:
                watched.stopped_since_s += gap_s

    def _at_fault(self, watched: _Watched) -> bool:
        if watched.seen is None or watched.seen.waiting:
            return False
        return watched.stopping or not watched.seen.in_collective

    def _stalled(self, holders: list[int]) -> list[JobStalled]:
        looks = [watched.seen for number, watched in self._workers.items() if number in holders and watched.seen]
        if not looks or not all(look.in_collective or look.waiting for look in looks):
            return []
        generation = max(look.tag.generation for look in looks)
        if generation == self._stalled_generation:
            return []
        self._stalled_generation = generation
        detail = f"all {len(looks)} ranks of {self.node} wait for others past their deadline"
        return [JobStalled(self.node, generation, detail)]

    def _still_s(self, worker: int, now_s: float) -> float:
        return now_s - self._workers[worker].changed_s

    def _blame(self, worker: int, cause: Cause, why: str, now_s: float) -> WorkerLost:
        watched = self._workers[worker]
        watched.lost = True
        still_s = self._still_s(worker, now_s)
        tag = watched.seen.tag if watched.seen else None
        where = f"{tag.phase} of step {tag.step}" if tag else "start-up"
        detail = f"hung in {where} for {still_s:.2f} s (allowed {self.deadline_s(worker):.2f} s): {why}"
        return WorkerLost(worker, cause, detail, False, tag, watched.changed_s)
