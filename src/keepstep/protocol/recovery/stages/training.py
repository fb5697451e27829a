"""The stage in which all ranks train."""

from __future__ import annotations

from collections.abc import Collection

from keepstep.protocol.messages import Cause, Drained, Holding, JobStalled, Resume, StepsFinished
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.end.drain import HOLDING
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.suspicion import Left, Silence, left_in_training
from keepstep.protocol.recovery.transitions import GiveUp, Next, Stage, ToDraining, ToEnded, ToFinished


class Training(JobStage):
    """Lasts until the loop of every rank has ended, or something fails."""

    stage = Stage.TRAINING
    answer = StepsFinished
    starts_spares = True
    reports_standstill = True
    judges_silence = True

    def __init__(self, job: JobState) -> None:
        super().__init__(job, job.roster.holder_numbers())
        job.progress.stands()
        job.standstill.all_move()
        step = job.progress.resume_at
        if job.drain.reason is not None:
            job.drain.end_at(step, job.generation)
        else:
            job.orders.to_all(Resume(job.generation), f"all ranks are at step {step}")
            # Start spares at once: a loss has to wait for them until they are warm.
            job.processes.top_up_spares("a spare took a rank: another is started")

    @property
    def busy(self) -> Collection[int]:
        """Those that agents have reported as idle. The others move, or wait for these."""
        return self.job.standstill.idle()

    def proceed(self, now_s: float) -> Next:
        """Goes on when all ranks have completed the last step. Ends the job if no rank can complete another step."""
        if not self.awaited and self.job.roster.num_holders:
            return ToFinished()
        uneven = self.job.standstill.uneven()
        return ToEnded(verdicts.uneven_steps(uneven)) if uneven else None

    def left_without(self, silence: Silence) -> Left | None:
        """Returns what is left without ranks that have made no progress: each rank holds a complete copy."""
        return left_in_training(self.job, silence)

    def overdue(self, now_s: float) -> Next:
        """Ends the job, because a script has ended and the others still train."""
        ended_early = verdicts.ended_early(self.job.roster)
        return ToEnded(ended_early) if ended_early else None

    def script_ended(self, now_s: float) -> Next:
        """Sets a deadline for the other scripts. If they do not end as well, the job cannot continue."""
        if self.job.roster.num_holders:
            self.deadline_s = self.deadline_s or now_s + self.job.deadlines.end_s
        return super().script_ended(now_s)

    def worker_ready(self, worker: Worker, now_s: float) -> Next:
        """Moves displaced ranks, because a new spare is warm."""
        return self.spread(now_s)

    def step_observed(self, now_s: float) -> Next:
        """Moves displaced ranks, because the ranks have completed a step of this generation."""
        return self.spread(now_s)

    def spread(self, now_s: float) -> Next:
        """Moves ranks to warm spares, if they share a device, their device is unhealthy, or their node drains.

        None moves in a job that drains: all of its nodes leave, and the spare's may be the next.
        """
        job = self.job
        if job.membership is None or job.drain.reason is not None:
            return None
        moved = job.processes.move(job.membership, now_s)
        return GiveUp(moved) if moved else None

    def job_stalled(self, report: JobStalled, now_s: float) -> Next:
        """Stops all ranks if those of all nodes wait: then no agent can find the rank at fault."""
        standstill = self.job.standstill
        if not standstill.stalled(report.node):
            return None
        return self.interrupted(Cause.STUCK, standstill.explained(report.detail, now_s), (), now_s)

    # ---- the drain of the job ---------------------------------------------------------------------------------------

    @property
    def drain_share(self) -> float:
        """A part in which ranks may reach a common step by themselves. All of it after the machine has stopped them."""
        return HOLDING if self.job.drain.may_hold else 1.0

    def drain_asked(self) -> Next:
        """Orders the ranks to hold before their next steps."""
        self.job.drain.hold(self.job.generation)
        return None

    def drain_answered(self, workers: Collection[int], message: Holding | Drained) -> Next:
        """Sends SIGTERM to the scripts when all ranks have done their part."""
        how = self.job.drain.answered(workers, message)
        return ToDraining(how) if how is not None else None

    def drain_overdue(self, now_s: float) -> Next:
        """Stops the ranks as after a failure. The resume rule then chooses the step."""
        if not self.job.drain.may_hold:
            return super().drain_overdue(now_s)
        self.job.drain.may_hold = False
        return self.interrupted(Cause.DRAIN, "the ranks did not reach a common step by themselves", (), now_s)
