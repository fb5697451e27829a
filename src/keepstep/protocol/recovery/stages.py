"""The stages of a job, what may follow what, and what the controller's machine is told and tells."""

from __future__ import annotations

import dataclasses
import enum

from keepstep.protocol.messages import AgentOrder

EXIT_FAILED = 1
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
    ENDED = "ended"


TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    Stage.STARTING: {
        Stage.RECOVERING: "all ranks ready",
        Stage.STOPPING: "rank lost",
        Stage.ENDED: "start-up failed",
    },
    Stage.TRAINING: {
        Stage.STOPPING: "rank lost, collective failed, or job stalled",
        Stage.FINISHED: "all steps completed",
        Stage.ENDED: "scripts ended",
    },
    Stage.STOPPING: {
        Stage.RECOVERING: "survivors safe, losses fenced, ranks filled",
        Stage.STARTING: "nothing trained yet, or checkpoint left: all ranks anew",
        Stage.RESCUING: "no process left to start",
        Stage.ENDED: "no holder left",
    },
    Stage.RECOVERING: {
        Stage.TRAINING: "all ranks at the resume step",
        Stage.STOPPING: "another failure",
        Stage.ENDED: "state does not match",
    },
    Stage.FINISHED: {Stage.ENDED: "scripts ended"},
    Stage.RESCUING: {Stage.ENDED: "state saved"},
    Stage.ENDED: {},
}
"""Which stage may follow which, and on what; the diagram in docs/PROTOCOL.md is drawn from it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What the user may set of the controller's machine. Durations in seconds."""

    world_size: int
    num_spares: int
    max_restarts: int | None = None
    """Processes that may be started beyond the first ones; None: no bound while the job makes progress."""
    max_recoveries_without_progress: int = 8
    """A step that fails so often in a row will fail again: the job ends instead of looping for ever."""
    start_deadline_s: float = 1800.0
    stop_deadline_s: float = 600.0
    """A backstop: a survivor that stands still is found by its agent long before."""
    recover_deadline_s: float = 300.0
    end_deadline_s: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An order to the agent of one node, and why it is given."""

    node: str
    order: AgentOrder
    reason: str
