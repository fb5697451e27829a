"""The stages of a job, the allowed transitions, and how a stage names the next one."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, TypeAlias

from keepstep.protocol.messages import EndJob, WorkerLost
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure


class Stage(enum.StrEnum):
    """The stages of a job. A recovery goes stopping -> recovering -> training."""

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
        Stage.STARTING: "nothing trained yet, or checkpoint left: restart all ranks",
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
"""stage -> next stage -> its causes. The diagram in docs/PROTOCOL.md is drawn from it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToStarting:
    """The agents start a process for every rank."""

    stage: ClassVar[Stage] = Stage.STARTING
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToStopping:
    """A failure: all ranks stop, and a new generation begins."""

    stage: ClassVar[Stage] = Stage.STOPPING
    cause: str
    detail: str
    failures: tuple[Failure, ...]
    """The lost ranks; empty if no rank is known to be lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToRecovering:
    """All ranks are held by stopped workers. Now they go to one step."""

    stage: ClassVar[Stage] = Stage.RECOVERING
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class ToTraining:
    """All ranks are at the resume step."""

    stage: ClassVar[Stage] = Stage.TRAINING


@dataclasses.dataclass(frozen=True, slots=True)
class ToFinished:
    """All ranks have completed the last step."""

    stage: ClassVar[Stage] = Stage.FINISHED


@dataclasses.dataclass(frozen=True, slots=True)
class ToRescuing:
    """The job cannot continue: each rank that holds state saves it."""

    stage: ClassVar[Stage] = Stage.RESCUING
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToDraining:
    """The last part of a drain: every script gets SIGTERM."""

    stage: ClassVar[Stage] = Stage.DRAINING
    how: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToEnded:
    """The job is over."""

    stage: ClassVar[Stage] = Stage.ENDED
    order: EndJob


Transition: TypeAlias = (
    ToStarting | ToStopping | ToRecovering | ToTraining | ToFinished | ToRescuing | ToDraining | ToEnded
)


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """The stage gives up live workers. The roster has them as lost already."""

    losses: list[tuple[Worker, WorkerLost]]


Next: TypeAlias = Transition | GiveUp | None
"""The current stage's decision after an event. None: the job stays in the stage."""
