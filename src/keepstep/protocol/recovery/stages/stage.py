"""The base class of stages: the events of a job, with the default answer to each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from keepstep.protocol import messages as msg
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.end.drain import AGREEING
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure
from keepstep.protocol.recovery.transitions import TRANSITIONS, Next, Stage, ToDraining, ToEnded, ToStopping


class JobStage:
    """One stage of a job."""

    stage: ClassVar[Stage]
    answer: ClassVar[type[msg.GroupAnswer] | None] = None
    """With this answer a rank holder has done its part, and the stage waits for it no longer."""
    prepares_training: ClassVar[bool] = False
    """Whether the ranks are on their way to their first, or next, common step."""
    needs_rendezvous: ClassVar[bool] = False
    """Whether ranks may be connecting, at the rendezvous that the controller holds in memory."""
    starts_spares: ClassVar[bool] = False
    """Whether the machine starts spares as soon as there is room. In a recovery, ranks come first."""
    reports_standstill: ClassVar[bool] = False
    """Whether ranks that stand still are news. In a recovery they are not: all of them stop."""
    blames_places: ClassVar[bool] = True
    """Whether a lost process speaks against its node and device."""

    def __init__(self, job: JobState, awaited: set[int] | None = None, deadline_s: float | None = None) -> None:
        self.job = job
        self.awaited: set[int] = set() if awaited is None else awaited
        """The rank holders whose answer the stage waits for; it goes on when none is left."""
        self.deadline_s = deadline_s
        """When `overdue` is due, on the clock of ``now_s``."""
        self.failure: str | None = None
        """Why the job does not end well; None while nothing speaks against it."""

    # ---- what the stage waits for -----------------------------------------------------------------------------------

    def proceed(self, now_s: float) -> Next:
        """The end of every event: what follows if the stage has all that it waits for."""
        return None

    def overdue(self, now_s: float) -> Next:
        """The deadline has come."""
        return None

    # ---- nodes and processes ----------------------------------------------------------------------------------------

    def node_joined(self, name: str, now_s: float) -> Next:
        """A node has offered itself, and the roster has it."""
        self.room_found(f"node {name} has joined")
        return None

    def node_lost(self, now_s: float) -> None:
        """A node is gone, and the roster no longer has it."""

    def room_found(self, reason: str) -> None:
        """A device may be free."""
        if self.starts_spares and self.job.progress.is_initialised:
            self.job.processes.top_up_spares(reason)

    def worker_joined(self, worker: Worker, now_s: float) -> None:
        """The script of a worker has called `keepstep.init()`.

        With the first one the machine starts the spares: beside a script that never calls it they would meet its ranks.
        """
        job = self.job
        if not job.progress.is_initialised:
            job.progress.is_initialised, self.deadline_s = True, now_s + job.settings.start_deadline_s
            job.processes.top_up_spares("the job starts")

    def worker_ready(self, worker: Worker, now_s: float) -> Next:
        """A worker stands at its first step."""
        return None

    def script_ended(self, now_s: float) -> Next:
        """The script of a rank holder has ended."""
        job = self.job
        if job.roster.num_holders:
            return None
        if not job.progress.is_initialised:
            return ToEnded(verdicts.ended_without_init())
        is_complete = self.stage is Stage.FINISHED
        return ToEnded(verdicts.scripts_through(job.roster, self.failure, job.record.detail, is_complete=is_complete))

    # ---- failures ---------------------------------------------------------------------------------------------------

    def interrupted(self, cause: str, detail: str, failures: Sequence[Failure], now_s: float) -> Next:
        """Something failed, whether or not a rank is known to be lost by it."""
        if Stage.STOPPING not in TRANSITIONS[self.stage]:
            return None
        return ToStopping(cause, detail, tuple(failures))

    def ranks_lost(self, failures: Sequence[Failure], now_s: float) -> Next:
        """Rank holders were lost at one moment."""
        first = failures[0]
        who = f"rank {first.rank}" if len(failures) == 1 else f"ranks {[each.rank for each in failures]}"
        return self.interrupted(first.cause, f"{who} lost: {first.detail}", failures, now_s)

    def spare_lost(self, detail: str, now_s: float) -> Next:
        """A spare was lost."""
        if self.starts_spares:
            self.job.processes.top_up_spares(f"a spare was lost: {detail}")
        return None

    def job_stalled(self, report: msg.JobStalled, now_s: float) -> Next:
        """All ranks of a node wait for others, past their deadlines."""
        return None

    def controller_restarted(self, now_s: float) -> Next:
        """The controller is back with its journal. The rendezvous was in its memory, so the ranks there stop."""
        if self.deadline_s is not None:
            self.deadline_s = max(self.deadline_s, now_s + self.job.settings.end_deadline_s)
        if not self.needs_rendezvous:
            return None
        return self.interrupted(msg.Cause.CONTROLLER, "the controller was restarted", (), now_s)

    # ---- training ---------------------------------------------------------------------------------------------------

    def step_observed(self, now_s: float) -> Next:
        """The ranks of a node have completed a step."""
        return None

    def spread(self, now_s: float) -> Next:
        """Ranks that ought to be elsewhere go there, if they can now."""
        return None

    # ---- the drain of the job ---------------------------------------------------------------------------------------

    @property
    def drain_share(self) -> float:
        """The part of the grace period of a drain after which `drain_overdue` is due."""
        return 1.0

    def drain_asked(self) -> Next:
        """The drain has begun."""
        return None

    def drain_answered(self, workers: Collection[int], message: msg.Holding | msg.Drained) -> Next:
        """Ranks hold before a step, or stand at the last one and have done their part."""
        self.job.drain.answered(workers, message)
        return None

    def drain_overdue(self, now_s: float) -> Next:
        """The time that the drain leaves to this stage is over."""
        return ToEnded(verdicts.drained(self.job.drain.reason, verdicts.KILLED_AFTER_GRACE))


class RecoveryStage(JobStage):
    """A stage between a failure and training: what a drain means for it."""

    prepares_training = True

    @property
    def drain_share(self) -> float:
        """A part, so that there is time left for the scripts."""
        return AGREEING

    def drain_asked(self) -> Next:
        """A job that has trained recovers first, and ends where all ranks stand then."""
        return None if self.job.progress.has_trained else ToDraining("training had not begun")

    def drain_overdue(self, now_s: float) -> Next:
        """The scripts get the signal wherever they are."""
        late = self.job.roster.ranks_of(self.awaited)
        return ToDraining(f"ranks {late} did not reach a common step within half of the grace period")
