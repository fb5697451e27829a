"""The record of one recovery, from which the report, the drill's table and the timeline are made."""

from __future__ import annotations

import enum

import msgspec

from keepstep.protocol.messages import Cause
from keepstep.protocol.resume import Action


class Origin(enum.StrEnum):
    """Where the state comes from with which a rank goes on."""

    OWN = "own copy"
    """It kept its copy, and ran the update that it was synced for, or undid the step that broke off."""
    REPLICA = "replica"
    """From live ranks that hold the same shard."""
    SNAPSHOT = "snapshot in memory"
    """From its own snapshot, or that of the process that held the rank before, in the memory of the node, or from the
    second copy on another one."""
    CHECKPOINT = "checkpoint"
    """From a file."""


class Warmth(enum.StrEnum):
    """How far a process was when it was given a lost rank."""

    WARM = "warm"
    """It stood before its first step."""
    HALF_WARM = "half-warm"
    """Its script could go no further without a rank: it had imported, and perhaps built its model."""
    COLD = "cold"
    """It was started, or its node joined, after the rank was lost."""


class Failure(msgspec.Struct):
    """One lost rank of a recovery."""

    rank: int
    cause: str
    detail: str
    step: int | None
    phase: str | None
    since_s: float
    """Monotonic time of the failure itself, as well as it is known."""


class RecoveryRecord(msgspec.Struct):
    """One recovery, begun by a failure and ended by training, or by the next failure (``superseded``).

    All times are the monotonic clock of the controller in seconds; None where the recovery did not get there.
    """

    generation: int
    cause: str
    detail: str
    begun_s: float
    """The controller learned of the failure."""
    failures: list[Failure] = msgspec.field(default_factory=list)
    unexplained: set[int] = msgspec.field(default_factory=set)
    """The lost ranks of which the agent will tell how their process ended; until then the recovery is not reported."""
    stopped_s: float | None = None
    """The last survivor reached its safe point and the last lost process was gone."""
    decided_s: float | None = None
    """Resume step and replacements were fixed (later than ``stopped_s`` by the wait for a replacement)."""
    reset_s: float | None = None
    """The last rank had its process groups connected."""
    restored_s: float | None = None
    """The last rank stood at the resume step, checked."""
    resumed_s: float | None = None
    """The last rank completed its first step of the new generation."""
    first_step_s: float | None = None
    """How long that step itself took on the slowest rank."""
    resume_step: int | None = None
    stopped_at_step: int | None = None
    """The furthest step that a survivor had begun when it was stopped."""
    actions: dict[int, str] = msgspec.field(default_factory=dict)
    replacements: dict[int, int] = msgspec.field(default_factory=dict)
    """rank -> worker that took it."""
    warmth: dict[int, Warmth] = msgspec.field(default_factory=dict)
    """rank -> how far that worker was."""
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
        """How many ranks were lost because their script raised."""
        return sum(failure.cause == Cause.EXCEPTION for failure in self.failures)

    def add_failure(self, failure: Failure, cause: str, detail: str) -> None:
        """One more lost rank; the first of them says why the recovery was begun, also where a hint came before it."""
        if not self.failures:
            self.cause, self.detail = cause, detail
        self.failures.append(failure)
        if failure.cause == Cause.DIED:
            self.unexplained.add(failure.rank)

    def name_cause(self, rank: int, cause: str, detail: str) -> None:
        """How a lost rank's process ended is known now."""
        self.unexplained.discard(rank)
        for failure in self.failures:
            if failure.rank == rank:
                if failure is self.failures[0]:
                    self.cause, self.detail = cause, f"rank {rank} lost: {detail}"
                failure.cause, failure.detail = cause, detail

    def origins(self) -> dict[int, Origin]:
        """rank -> where the state comes from with which it goes on; empty before that is decided."""
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
        """A node's ranks have completed their first step of the new generation; the last and the slowest count."""
        self.observed_on.add(node)
        self.resumed_s = max(self.resumed_s or at_s, at_s)
        self.first_step_s = max(self.first_step_s or 0.0, step_s)

    @property
    def steps_recomputed(self) -> int | None:
        """How many steps are computed again because of this failure: 0 or 1, or those since the newest snapshot.

        Counted from the step in which the lost rank was (or the furthest survivor, where no rank was lost): what a
        survivor had begun of the step after it had to wait for the lost rank in any case.
        """
        if self.resume_step is None:
            return None
        steps = [failure.step for failure in self.failures if failure.step is not None]
        furthest = max(steps, default=self.stopped_at_step)
        return None if furthest is None else max(0, furthest + 1 - self.resume_step)

    def parts(self) -> list[tuple[str, float | None, float | None]]:
        """What the recovery consists of, each part with its beginning and end; ``gap`` is the whole of it."""
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
        """The parts of the recovery: detect, stop, decide, reset, restore, resume, and the whole gap.

        ``gap`` runs from the failure to the first step completed by all; ``resume`` is its last part, in which that
        step is computed.
        """
        return {
            name: None if begin is None or end is None else round((end - begin) * 1000, 3)
            for name, begin, end in self.parts()
        }
