"""The base class of stages: one method for each event of a job, with the default answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from keepstep.protocol import messages as msg
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.end.drain import AGREEING
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure, losses
from keepstep.protocol.recovery.suspicion import Left, Silence
from keepstep.protocol.recovery.transitions import TRANSITIONS, Next, Stage, ToDraining, ToEnded, ToStopping


class JobStage:
    """Base class of the stages of a job. Methods return the stage's decision; None: the job stays in the stage."""

    stage: ClassVar[Stage]
    answer: ClassVar[type[msg.GroupAnswer] | None] = None
    """The type of the answer for which the stage waits, from each rank holder; None: no answer."""
    prepares_training: ClassVar[bool] = False
    """Whether the ranks are on their way to their first or next common step."""
    needs_rendezvous: ClassVar[bool] = False
    """Whether ranks may use the rendezvous, which is in the controller's memory."""
    starts_spares: ClassVar[bool] = False
    """Whether the machine starts spares as soon as there is room. In a recovery, ranks come first."""
    reports_standstill: ClassVar[bool] = False
    """Whether ranks without progress are reported. In a recovery they are not, because all ranks stop."""
    judges_silence: ClassVar[bool] = False
    """Whether ranks may be given up for silence; see `keepstep.protocol.recovery.suspicion`. At the end of a job they
    are not: no rank could take their place."""
    blames_places: ClassVar[bool] = True
    """Whether a lost process counts as a failure of its node and device, for the quarantine."""

    def __init__(self, job: JobState, awaited: set[int] | None = None, deadline_s: float | None = None) -> None:
        self.job = job
        self.awaited: set[int] = set() if awaited is None else awaited
        """The rank holders for whose answer the stage waits. It ends when none is left."""
        self.deadline_s = deadline_s
        """When `overdue` is due, on the clock of ``now_s``."""
        self.failure: str | None = None
        """Why the job will end with an error; None if no reason is known."""

    @property
    def busy(self) -> Collection[int]:
        """The workers that hold ranks and do not wait for other processes, as far as the controller knows."""
        return self.awaited

    # ---- end of the wait --------------------------------------------------------------------------------------------

    def proceed(self, now_s: float) -> Next:
        """Runs at the end of every event. Returns the next transition if the stage has all for which it waits."""
        return None

    def overdue(self, now_s: float) -> Next:
        """Runs when the deadline has come."""
        return None

    def gives_up(self, reason: str, now_s: float) -> Next:
        """Runs when a rank has been silent for so long that the job ends (``--give-up-after``): the others stop, and
        save what they have."""
        if self.job.gives_up is not None:
            return None
        self.job.gives_up = reason
        return self.interrupted(msg.Cause.HANG, reason, (), now_s)

    def state_moves(self, now_s: float) -> None:
        """Runs when a rank has moved a part of a state, in a recovery or a rescue."""

    # ---- nodes and processes ----------------------------------------------------------------------------------------

    def node_joined(self, name: str, now_s: float) -> Next:
        """Runs when a node has joined. The roster already contains it."""
        self.room_found(f"node {name} has joined")
        return None

    def node_lost(self, now_s: float) -> None:
        """Runs when a node is lost. The roster no longer contains it."""

    def room_found(self, reason: str) -> None:
        """Runs when a device may be free: starts spares, if the stage does so."""
        if self.starts_spares and self.job.progress.is_initialised:
            self.job.processes.top_up_spares(reason)

    def worker_joined(self, worker: Worker, now_s: float) -> None:
        """Runs when the script of a worker has called `keepstep.init()`.

        With the first such call the machine starts the spares. They would interfere with a script that never calls it.
        """
        job = self.job
        if not job.progress.is_initialised:
            job.progress.is_initialised, self.deadline_s = True, now_s + job.deadlines.start_s
            job.processes.top_up_spares("the job starts")

    def worker_ready(self, worker: Worker, now_s: float) -> Next:
        """Runs when a worker is at its first step."""
        return None

    def script_ended(self, now_s: float) -> Next:
        """Runs when the script of a rank holder has ended."""
        job = self.job
        if job.roster.num_holders:
            return None
        if not job.progress.is_initialised:
            return ToEnded(verdicts.ended_without_init())
        is_complete = self.stage is Stage.FINISHED
        return ToEnded(verdicts.scripts_through(job.roster, self.failure, job.record.detail, is_complete=is_complete))

    # ---- failures ---------------------------------------------------------------------------------------------------

    def interrupted(self, cause: str, detail: str, failures: Sequence[Failure], now_s: float) -> Next:
        """Runs on a failure, whether or not a rank is known to be lost."""
        if Stage.STOPPING not in TRANSITIONS[self.stage]:
            return None
        if self.job.record.resumed_s is None:
            self.job.record.superseded = True
        return ToStopping(cause, detail, tuple(failures))

    def ranks_lost(self, failures: Sequence[Failure], now_s: float) -> Next:
        """Runs when rank holders were lost at one moment."""
        return self.interrupted(failures[0].cause, losses(failures), failures, now_s)

    def spare_lost(self, detail: str, now_s: float) -> Next:
        """Runs when a spare was lost."""
        if self.starts_spares:
            self.job.processes.top_up_spares(f"a spare was lost: {detail}")
        return None

    def left_without(self, silence: Silence) -> Left | None:
        """Returns what would be left of the job without silent workers; None if that is not known yet.

        Before the ranks have trained together there is nothing to lose.
        """
        return Left.MEMORY

    def job_stalled(self, report: msg.JobStalled, now_s: float) -> Next:
        """Runs when all ranks of a node wait for others past their deadlines."""
        return None

    def controller_restarted(self, now_s: float) -> Next:
        """Runs when the controller has restarted. It has lost the rendezvous, so ranks that may use it must stop."""
        if self.deadline_s is not None:
            self.deadline_s = max(self.deadline_s, now_s + self.job.deadlines.end_s)
        if not self.needs_rendezvous:
            return None
        return self.interrupted(msg.Cause.CONTROLLER, "the controller was restarted", (), now_s)

    # ---- training ---------------------------------------------------------------------------------------------------

    def step_observed(self, now_s: float) -> Next:
        """Runs when the ranks of a node have completed their first step of the generation."""
        return None

    def spread(self, now_s: float) -> Next:
        """Moves displaced ranks to other devices, if that is possible now."""
        return None

    # ---- the drain of the job ---------------------------------------------------------------------------------------

    @property
    def drain_share(self) -> float:
        """The share of a drain's grace period after which `drain_overdue` is due."""
        return 1.0

    def drain_asked(self) -> Next:
        """Runs when a drain has begun."""
        return None

    def drain_answered(self, workers: Collection[int], message: msg.Holding | msg.Drained) -> Next:
        """Runs when ranks hold before a step, or have done their part at the last one."""
        self.job.drain.answered(workers, message)
        return None

    def drain_overdue(self, now_s: float) -> Next:
        """Runs when this stage's share of the grace period is over."""
        return ToEnded(verdicts.drained(self.job.drain.reason, verdicts.KILLED_AFTER_GRACE))


class RecoveryStage(JobStage):
    """Base class of the stages between a failure and training, with their answers to a drain."""

    prepares_training = True
    judges_silence = True

    @property
    def drain_share(self) -> float:
        """A part of the grace period. The rest is for the scripts."""
        return AGREEING

    def drain_asked(self) -> Next:
        """Continues the recovery of a job that has trained, which then ends at the resume step. Else ends the job."""
        return None if self.job.progress.has_trained else ToDraining("training had not begun")

    def drain_overdue(self, now_s: float) -> Next:
        """Sends SIGTERM to the scripts, wherever they are."""
        late = self.job.roster.ranks_of(self.awaited)
        return ToDraining(f"ranks {late} did not reach a common step within half of the grace period")
