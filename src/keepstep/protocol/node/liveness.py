"""Hang detection of the agent's machine: decides from observations which workers are suspected to hang.

Only the progress of the *training* thread counts, never a heartbeat of another thread. Lack of progress is suspicious
only if the worker does not wait for another one. A rank inside a collective waits for the rank that has not entered it,
and killing it would be a bug. If every rank of the node waits past its deadline, the agent reports the job as stalled.
The controller then stops all ranks, and the agent suspects a rank that does not stop.

Each deadline is learnt from the process itself. A warm process says nothing about a fresh one, which opens its data,
compiles and allocates in its first step, so first phases are compared with first phases only.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import Cause, FirstPhases, JobStalled, SuspicionLifted, Tag, WorkerSuspected
from keepstep.protocol.phases import Phase
from keepstep.protocol.wording import place_of

WAIT_FACTOR = 2.0
"""A wait for others may take this many times `Deadlines.hang_after_s` in a phase of which no duration is known."""
WINDOW = 64
"""Number of recent durations kept for each phase. The deadline of the phase follows from the longest of them."""
MEASURED = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED})
"""The phases whose deadline follows from measured durations. The others contain code of the script that keepstep knows
nothing about: `Phase.OPTIMIZER` lasts until the end of the step, with all lines after the update."""


def was_passed(before: Tag, after: Tag) -> bool:
    """Returns whether a measured phase has ended by itself, and was not undone or interrupted.

    Args:
        before: the tag in that phase.
        after: the next tag of the rank.
    """
    return before.phase in MEASURED and before.generation == after.generation and before.step <= after.step


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """An observation of a worker's page and process.

    ``stopped``: SIGSTOP holds the process. ``unread``: it sleeps, and nobody reads the output of this job.
    """

    tag: Tag
    progress: int
    waiting: bool
    in_collective: bool
    stopped: bool
    unread: bool


Verdict = WorkerSuspected | SuspicionLifted | JobStalled


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
    suspected: bool = False
    is_unsaid: bool = False
    """Whether a suspicion must be said again, because the controller drops all of them when ranks stop."""
    obey_within_s: float | None = None
    """Deadline for the order that it has waited for; None: it has obeyed, or has not waited for one."""
    progress_at_order: int = -1
    """The progress that its page showed when the order came. The count changes as soon as the worker obeys."""
    builds: bool = False
    """Whether the worker is a spare whose script waits for the rank before its first step. Then the deadline of the
    start-up holds, not that of a recovery."""
    recent_s: dict[Phase, deque[float]] = dataclasses.field(default_factory=dict)
    """Durations of its completed phases, without the first one of each kind. A phase is absent until its first one has
    ended, or was cut short: what the process has opened and compiled by then is not done again."""

    @property
    def is_excused(self) -> bool:
        """Whether it waits for others. A broken collective is no excuse, nor is a wait for an order that has come."""
        look = self.seen
        if look is None or (look.waiting and self.obey_within_s is not None):
            return False
        return look.waiting or look.unread or (look.in_collective and not self.stopping)

    def has_had(self, *phases: Phase) -> None:
        """Records that the next phase of each kind is not the first one of this process."""
        for phase in phases:
            self.recent_s.setdefault(phase, deque(maxlen=WINDOW))

    def ordered(self, within_s: float) -> None:
        """Records an order. If it waits for one, it has to obey within this time."""
        if self.seen is not None and self.seen.waiting and self.obey_within_s is None:
            self.obey_within_s, self.progress_at_order = within_s, self.seen.progress


class LivenessMachine:
    """Watches the workers of one node. Call `observe` for each worker, then `judge`, and report the verdicts."""

    def __init__(self, node: str, deadlines: Deadlines) -> None:
        self.node = node
        self.deadlines = deadlines
        self._workers: dict[int, _Watched] = {}
        self._first_s: dict[Phase, float] = {}
        """The longest first phase of each kind that any process of the job has had, as far as this node knows."""
        self._stalled_generation = -1
        self._looked_s: float | None = None
        self.is_initialised = False
        """Whether a worker has called `keepstep.init()`. Before that, pages show nothing, and there is no deadline."""

    def watch(self, worker: int, rank: int | None, now_s: float) -> None:
        """Begins to watch a started worker, or records the rank of a spare."""
        watched = self._workers.setdefault(worker, _Watched(rank, changed_s=now_s, measured_from_s=now_s))
        watched.rank = rank

    def learn(self, first_phases: FirstPhases) -> None:
        """Records how long the first phases of other processes of the job took."""
        for phase, duration_s in first_phases:
            self._first_s[phase] = max(duration_s, self._first_s.get(phase, 0.0))

    @property
    def first_phases(self) -> FirstPhases:
        """The longest first phase of each kind that any process of the job has had, as far as this node knows."""
        return tuple(sorted(self._first_s.items()))

    def forget(self, worker: int) -> None:
        """Ends the watch of a worker whose process is gone."""
        self._workers.pop(worker, None)

    def stopping(self, workers: tuple[int, ...], now_s: float) -> None:
        """Records an order to stop. From now on a collective does not excuse these workers, because it is broken.

        A worker that has hung in code of its own goes on being late, and one that has not yet returned from a recovery
        still has only the time of a recovery.
        """
        for number in workers:
            if number in self._workers:
                watched = self._workers[number]
                if watched.seen is not None and watched.seen.tag.phase is not Phase.STARTING:
                    watched.has_had(*MEASURED)
                if watched.is_excused or watched.seen is None:
                    watched.changed_s = now_s
                watched.safe = watched.safe and watched.stopping
                watched.stopping = watched.is_unsaid = True
                watched.ordered(self.deadlines.long_s)  # it may be in the middle of reading a checkpoint

    def builds(self, worker: int, *, is_building: bool) -> None:
        """Records whether a spare's script waits for a rank during its start-up; False once it is at its first step."""
        if worker in self._workers:
            self._workers[worker].builds = is_building

    def safe(self, worker: int) -> None:
        """Records that the worker is at its safe point and waits for orders."""
        if worker in self._workers:
            self._workers[worker].safe = True

    def answered(self, worker: int, now_s: float) -> SuspicionLifted | None:
        """Records an answer of the training thread: it makes progress, even if the page has not shown it yet.

        Returns:
            What the controller must hear before the answer, so that it does not act on a suspicion that this refutes.
        """
        watched = self._workers.get(worker)
        if watched is None:
            return None
        watched.obey_within_s, watched.changed_s = None, now_s
        if watched.stopped_since_s is not None:
            watched.stopped_since_s = now_s
        was_suspected, watched.suspected = watched.suspected, False
        return SuspicionLifted(worker) if was_suspected else None

    def recovering(self, worker: int, now_s: float) -> None:
        """Records that the worker recovers: ``recovery_s`` is the deadline from now on."""
        if worker in self._workers:
            watched = self._workers[worker]
            watched.stopping = watched.safe = True
            watched.changed_s = now_s
            watched.ordered(self.deadlines.recovery_s)

    def resumed(self, now_s: float) -> None:
        """Records that training continues. A stall from now on is reported again."""
        self._stalled_generation = -1
        for watched in self._workers.values():
            watched.stopping = watched.safe = False
            watched.changed_s = watched.measured_from_s = now_s
            watched.ordered(self.deadlines.recovery_s)

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
        if before is not None and before.unread and not look.unread:
            watched.changed_s = now_s  # somebody reads again, and the rank is about to go on
        if not look.waiting or look.progress != watched.progress_at_order:
            watched.obey_within_s = None
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
        if watched is None:
            return
        counts = not watched.stopping and watched.measured_from_s <= began_s <= ended_s
        if counts and phase in watched.recent_s:
            watched.recent_s[phase].append(ended_s - began_s)
        elif counts:
            self.learn(((phase, ended_s - began_s),))
        watched.has_had(phase)

    def deadline_s(self, worker: int) -> float:
        """Returns how long this worker may make no progress in its current phase, in seconds."""
        watched, deadlines = self._workers[worker], self.deadlines
        phase = watched.seen.tag.phase if watched.seen else Phase.STARTING
        if phase is Phase.STARTING and not self.is_initialised:
            return math.inf
        if watched.obey_within_s is not None:
            return watched.obey_within_s
        if watched.stopping and watched.safe and not watched.builds:
            return deadlines.recovery_s
        if phase not in MEASURED:
            return deadlines.long_s
        longest_s = max(watched.recent_s.get(phase, ()), default=self._first_s.get(phase))
        if longest_s is None:
            return deadlines.long_s
        return max(deadlines.hang_after_s, deadlines.hang_factor * longest_s)

    def judge(self, now_s: float) -> list[Verdict]:
        """Returns the workers that are newly suspected, and those that are not any more. If all ranks of the node wait
        past their deadlines, and none is suspected, returns a `JobStalled` instead, once for each stall."""
        self._discount_own_pause(now_s)
        verdicts: list[Verdict] = []
        for number, watched in self._workers.items():
            suspicion = self._suspicion(number, watched, now_s)
            if suspicion is not None and (watched.is_unsaid or not watched.suspected):
                verdicts.append(suspicion)
            elif suspicion is None and watched.suspected:
                verdicts.append(SuspicionLifted(number))
            watched.suspected, watched.is_unsaid = suspicion is not None, False
        holders = [number for number, watched in self._workers.items() if watched.rank is not None]
        if not all(self._waits_too_long(number, now_s) for number in holders):
            self._stalled_generation = -1
        elif holders and not any(watched.suspected for watched in self._workers.values()):
            verdicts += self._stalled(holders)
        return verdicts

    def _suspicion(self, number: int, watched: _Watched, now_s: float) -> WorkerSuspected | None:
        """Returns why a worker is suspected now; None if it is not. The caller adds the snapshots in its memory."""
        look = watched.seen
        if look is None:
            return None
        place = place_of(look.tag.phase, look.tag.step)
        if (since_s := watched.stopped_since_s) is not None and now_s - since_s > self.deadlines.hang_after_s:
            stopped_s = f"for {now_s - since_s:.1f} s (allowed {self.deadlines.hang_after_s:.1f} s)"
            detail = f"its process has been stopped by a signal (SIGSTOP) {place} {stopped_s}"
            return WorkerSuspected(number, Cause.STOPPED, detail, look.tag, since_s, ())
        still_s, deadline_s = now_s - watched.changed_s, self.deadline_s(number)
        if watched.rank is None or watched.is_excused or still_s <= deadline_s:
            return None
        allowed = f"(allowed {deadline_s:.1f} s), and it waits for no other rank"
        detail = f"no progress {place} for {still_s:.1f} s {allowed}"
        return WorkerSuspected(number, Cause.HANG, detail, look.tag, watched.changed_s, ())

    def _waits_too_long(self, number: int, now_s: float) -> bool:
        """Whether a rank has made no progress past its deadline.

        While it waits for others the script does nothing, so the long deadline does not apply. The first collectives of
        a job connect its ranks, and need some time.
        """
        watched, deadline_s = self._workers[number], self.deadline_s(number)
        waits = watched.seen is not None and (watched.seen.waiting or watched.seen.in_collective)
        if waits and deadline_s == self.deadlines.long_s:
            deadline_s = WAIT_FACTOR * self.deadlines.hang_after_s
        return now_s - watched.changed_s > deadline_s

    def standing(self, least_s: float, now_s: float) -> list[tuple[int, Observation, float]]:
        """Returns the rank holders without progress for at least ``least_s``, except in recoveries.

        Returns:
            (worker, its last observation, seconds without progress).
        """
        return [
            (number, watched.seen, still_s)
            for number, watched in self._workers.items()
            if watched.rank is not None and watched.seen is not None and not watched.stopping
            if (still_s := now_s - watched.changed_s) >= least_s
        ]

    def _discount_own_pause(self, now_s: float) -> None:
        """Extends all deadlines by the time in which the agent itself was paused, or by which its clock jumped."""
        before, self._looked_s = self._looked_s, now_s
        if before is None or abs(now_s - before) <= self.deadlines.blind_s:
            return
        gap_s = now_s - before
        for watched in self._workers.values():
            watched.changed_s += gap_s
            watched.measured_from_s = now_s
            if watched.stopped_since_s is not None:
                watched.stopped_since_s += gap_s

    def _stalled(self, holders: list[int]) -> list[JobStalled]:
        looks = [watched.seen for number, watched in self._workers.items() if number in holders and watched.seen]
        if not looks or not all((look.in_collective or look.waiting) and not look.stopped for look in looks):
            return []
        generation = max(look.tag.generation for look in looks)
        if generation == self._stalled_generation:
            return []
        self._stalled_generation = generation
        detail = f"all {len(looks)} ranks of {self.node} wait for others past their deadline"
        return [JobStalled(self.node, generation, detail)]
