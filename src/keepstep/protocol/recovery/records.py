"""The record of one recovery. The report, the drill's table and the timeline are made of it."""

from __future__ import annotations

import enum
from collections.abc import Collection

import msgspec

from keepstep.protocol.messages import Cause
from keepstep.protocol.resume import Action
from keepstep.protocol.wording import by_reason


class Origin(enum.StrEnum):
    """The source of the state with which a rank resumes."""

    OWN = "own copy"
    """The rank kept its copy. It ran the update for which it was synced, or undid the interrupted step."""
    REPLICA = "replica"
    """The rank received the state from live ranks with the same shard."""
    SNAPSHOT = "snapshot in memory"
    """The rank loaded a snapshot in its node's memory, its own or that of the rank's former process, or received the
    second copy from another node."""
    CHECKPOINT = "checkpoint"
    """The rank loaded a checkpoint file."""


class Warmth(enum.StrEnum):
    """The state of a process when it took a lost rank."""

    WARM = "warm"
    """The process waited at its first step."""
    HALF_WARM = "half-warm"
    """The script waited at a line that needs the rank. It had done its imports, and perhaps built its model."""
    COLD = "cold"
    """The process was started, or its node joined, after the rank was lost."""


class Failure(msgspec.Struct):
    """One lost rank of a recovery."""

    rank: int
    cause: str
    detail: str
    step: int | None
    phase: str | None
    since_s: float
    """Estimated time of the failure itself, on the controller's monotonic clock."""


def losses(failures: Collection[Failure]) -> str:
    """Returns one sentence that names every lost rank."""
    return by_reason(((failure.rank, failure.detail) for failure in failures), what=" lost")


class RecoveryRecord(msgspec.Struct):
    """One recovery. It begins with a failure, and ends with training or with the next failure (``superseded``).

    All times are in seconds on the controller's monotonic clock. A time is None if the recovery did not get there.
    """

    generation: int
    cause: str
    """That of the first failure."""
    detail: str
    """What has failed: every lost rank with its reason, or the hint that began the recovery if no rank was lost."""
    begun_s: float
    """When the controller learned of the failure."""
    failures: list[Failure] = msgspec.field(default_factory=list)
    unexplained: set[int] = msgspec.field(default_factory=set)
    """Lost ranks whose exit status the agent has yet to report. The recovery's report waits for that."""
    stopped_s: float | None = None
    """When the last survivor had reached its safe point, and the last lost process was gone."""
    decided_s: float | None = None
    """When resume step and replacements were decided: later than ``stopped_s`` by the wait for a replacement."""
    reset_s: float | None = None
    """When the last rank had connected its process groups."""
    restored_s: float | None = None
    """When the last rank was at the resume step, with its state verified."""
    resumed_s: float | None = None
    """When the last rank had completed its first step of the new generation."""
    first_step_s: float | None = None
    """Duration of that step on the slowest rank, in seconds."""
    resume_step: int | None = None
    stopped_at_step: int | None = None
    """The furthest step that a survivor had begun when it was stopped."""
    actions: dict[int, str] = msgspec.field(default_factory=dict)
    replacements: dict[int, int] = msgspec.field(default_factory=dict)
    """rank -> the worker that took it."""
    warmth: dict[int, Warmth] = msgspec.field(default_factory=dict)
    """rank -> the state of that worker when it took the rank."""
    received_bytes: int = 0
    read_checkpoint: set[int] = msgspec.field(default_factory=set)
    """The ranks that rewound to a checkpoint."""
    got_copy: set[int] = msgspec.field(default_factory=set)
    """The ranks to which a buddy sent the second copy of their snapshot."""
    superseded: bool = False
    observed_on: set[str] = msgspec.field(default_factory=set)
    """The nodes whose ranks have completed their first step of the new generation."""

    @property
    def num_exceptions(self) -> int:
        """Number of ranks that were lost because their script raised an exception."""
        return sum(failure.cause == Cause.EXCEPTION for failure in self.failures)

    def add_failures(self, failures: Collection[Failure]) -> None:
        """Adds lost ranks. The first one sets the recovery's cause, even if a hint has begun the recovery."""
        self.failures += failures
        self.unexplained |= {failure.rank for failure in failures if failure.cause == Cause.DIED}
        self._explain()

    def name_cause(self, rank: int, cause: str, detail: str) -> None:
        """Records how a lost rank's process ended."""
        self.unexplained.discard(rank)
        for failure in self.failures:
            if failure.rank == rank:
                failure.cause, failure.detail = cause, detail
        self._explain()

    def _explain(self) -> None:
        self.cause, self.detail = self.failures[0].cause, losses(self.failures)

    def origins(self) -> dict[int, Origin]:
        """Returns rank -> source of its state. Empty before the decision."""
        found = {}
        for rank, action in self.actions.items():
            match Action(action):
                case Action.STAY | Action.ADVANCE:
                    found[rank] = Origin.OWN
                case Action.RESTORE:
                    found[rank] = Origin.SNAPSHOT if rank in self.got_copy else Origin.REPLICA
                case Action.REWIND:
                    found[rank] = Origin.CHECKPOINT if rank in self.read_checkpoint else Origin.SNAPSHOT
        return found

    def observe_step(self, node: str, at_s: float, step_s: float) -> None:
        """Records that a node's ranks have completed their first step. The latest time and longest duration count."""
        self.observed_on.add(node)
        self.resumed_s = max(self.resumed_s or at_s, at_s)
        self.first_step_s = max(self.first_step_s or 0.0, step_s)

    @property
    def steps_recomputed(self) -> int | None:
        """Number of steps computed again because of this failure: 0 or 1, or those since the newest snapshot.

        Counted from the step of the lost rank, or of the furthest survivor if no rank was lost. A survivor's part of
        the next step does not count, because it would have waited for the lost rank in any case.
        """
        if self.resume_step is None:
            return None
        steps = [failure.step for failure in self.failures if failure.step is not None]
        furthest = max(steps, default=self.stopped_at_step)
        return None if furthest is None else max(0, furthest + 1 - self.resume_step)

    def parts(self) -> list[tuple[str, float | None, float | None]]:
        """Returns (name, begin, end) of each part of the recovery; ``gap`` is all of it."""
        since = min(
            (failure.since_s for failure in self.failures if failure.since_s < self.begun_s), default=self.begun_s
        )
        return [
            ("detect", since, self.begun_s),
            ("stop", self.begun_s, self.stopped_s),
            ("decide", self.stopped_s, self.decided_s),
            ("reset", self.decided_s, self.reset_s),
            ("restore", self.reset_s, self.restored_s),
            ("resume", self.restored_s, self.resumed_s),
            ("gap", since, self.resumed_s),
        ]

    def milliseconds(self) -> dict[str, float | None]:
        """Returns the durations of the parts in milliseconds: detect, stop, decide, reset, restore, resume, and gap.

        ``gap`` is the time from the failure until all ranks have completed a step. ``resume`` is its last part, in
        which they compute that step.
        """
        return {
            name: None if begin is None or end is None else round((end - begin) * 1000, 3)
            for name, begin, end in self.parts()
        }
