"""The stages of a job, what may follow what, and what the controller's machine is told and tells."""

from __future__ import annotations

import dataclasses
import enum

from keepstep.errors import InternalError
from keepstep.protocol.messages import AgentOrder, EndJob
from keepstep.protocol.recovery.placement.quarantine import NUM_FAILURES, WINDOW_S

EXIT_FAILED = 1
EXIT_DRAINED = 1
"""torchrun's, where a signal has ended it (measured with torch 2.13)."""
GRACE_S = 30.0
"""torchrun's ``--shutdown-timeout``, and the ``terminationGracePeriodSeconds`` of Kubernetes."""
EXIT_NOTHING_TO_RECOVER = 75
EXIT_TOO_FEW_RANKS = 76


class Stage(enum.StrEnum):
    """Where the job is; a recovery goes stopping -> recovering -> training."""

    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"
    RECOVERING = "recovering"
    FINISHED = "finished"
    RESCUING = "rescuing"
    DRAINING = "draining"
    ENDED = "ended"


TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    Stage.STARTING: {
        Stage.RECOVERING: "all ranks ready",
        Stage.STOPPING: "rank lost, or controller restarted",
        Stage.DRAINING: "drain asked for",
        Stage.ENDED: "start-up failed",
    },
    Stage.TRAINING: {
        Stage.STOPPING: "rank lost, collective failed, job stalled, or drain overdue",
        Stage.DRAINING: "all ranks at the last step",
        Stage.FINISHED: "all steps completed",
        Stage.ENDED: "scripts ended, or their loops unevenly",
    },
    Stage.STOPPING: {
        Stage.RECOVERING: "survivors safe, losses fenced, ranks filled",
        Stage.STARTING: "nothing trained yet, or checkpoint left: all ranks anew",
        Stage.RESCUING: "no process left to start",
        Stage.DRAINING: "drain overdue",
        Stage.ENDED: "no holder left",
    },
    Stage.RECOVERING: {
        Stage.TRAINING: "all ranks at the resume step",
        Stage.STOPPING: "another failure",
        Stage.DRAINING: "drain overdue",
        Stage.ENDED: "state does not match",
    },
    Stage.FINISHED: {Stage.DRAINING: "drain asked for", Stage.ENDED: "scripts ended"},
    Stage.RESCUING: {Stage.ENDED: "state saved"},
    Stage.DRAINING: {Stage.ENDED: "scripts ended, or grace period over"},
    Stage.ENDED: {},
}
"""Which stage may follow which, and on what; the diagram in docs/PROTOCOL.md is drawn from it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What the user may set of the controller's machine. Durations in seconds."""

    world_size: int
    num_spares: int
    ranks_per_node: int | None = None
    """None: as many as a node has room for."""
    most_per_node: int = 0
    """So many workers a node takes in where there is no other room: they share its devices, until others are free."""
    max_restarts: int | None = None
    """Processes that may be started beyond the first ones; None: no bound while the job makes progress."""
    max_recoveries_without_progress: int = 8
    """A step that fails so often in a row will fail again: the job ends instead of looping for ever."""
    start_deadline_s: float = 1800.0
    spares_grace_s: float = 30.0
    """When there is room for all ranks, nodes that bring the room for the spares are waited for so long."""
    stop_deadline_s: float = 600.0
    """A backstop: a survivor that stands still is found by its agent long before."""
    recover_deadline_s: float = 300.0
    end_deadline_s: float = 60.0
    grace_s: float = GRACE_S
    """From the beginning of a drain until what still runs is killed."""
    quarantine_failures: int = NUM_FAILURES
    """A node or device that failed so often within the window is the last to be taken; 0: none is."""
    quarantine_window_s: float = WINDOW_S


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An order to the agent of one node, and why it is given."""

    node: str | None
    """None: the same to every node."""
    order: AgentOrder
    reason: str


class Course:
    """Where a job is: its stage, whom that stage waits for, and until when."""

    def __init__(self) -> None:
        self.stage = Stage.STARTING
        self.generation = 1
        self.awaited: set[int] = set()
        """The rank holders whose answer the stage waits for; it goes on when none is left."""
        self.deadline_s: float | None = None
        self.ended: EndJob | None = None

    def next_deadline(self) -> float | None:
        """When `tick` is next due, on the clock of ``now_s``; None while nothing is waited for."""
        return self.deadline_s

    def enter(self, stage: Stage, awaited: set[int], deadline_s: float | None) -> None:
        """Goes on to a stage, which says whom it waits for and until when.

        Raises:
            InternalError: the stage cannot follow the present one.
        """
        if stage is not self.stage and stage not in TRANSITIONS[self.stage]:
            raise InternalError(f"generation {self.generation}: {self.stage} cannot become {stage}")
        self.stage, self.awaited, self.deadline_s = stage, awaited, deadline_s
