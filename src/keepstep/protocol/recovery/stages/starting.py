"""The start of a job: the machine waits for nodes, starts the ranks there, and waits until all ranks are ready."""

from __future__ import annotations

from keepstep.protocol.messages import Cause
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.decision import begins_again, reachable_step, ready_now
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.suspicion import Left, Silence
from keepstep.protocol.recovery.transitions import Next, Stage, ToDraining, ToEnded, ToRecovering, ToStarting


class WaitingForNodes(JobStage):
    """Lasts until there is room for all ranks and spares, or after a while for all ranks."""

    stage = Stage.STARTING

    def __init__(self, job: JobState) -> None:
        super().__init__(job)
        self._all_ranks_fit = False
        """Whether all ranks have room, and the stage waits only for nodes with room for spares."""
        self._may_be_oversubscribed = False
        """Whether all ranks have room on shared devices, and the stage waits only for nodes with more devices."""

    def node_joined(self, name: str, now_s: float) -> Next:
        """Starts the ranks if all ranks and spares have room. Shortens the deadline if only the ranks have."""
        settings, processes = self.job.settings, self.job.processes
        if self.deadline_s is None:
            self.deadline_s = now_s + self.job.deadlines.start_s
        if not self._all_ranks_fit and processes.all_ranks_fit():
            self._all_ranks_fit = True
            self.deadline_s = min(self.deadline_s, now_s + settings.spares_grace_s)
        elif not self._may_be_oversubscribed and settings.most_per_node:
            self._may_be_oversubscribed = processes.room_for_ranks() >= settings.world_size
            if self._may_be_oversubscribed:
                self.deadline_s = min(self.deadline_s, now_s + settings.spares_grace_s)
        is_complete = processes.all_spares_fit() or not settings.nodes_may_join
        return ToStarting("the job starts") if self._all_ranks_fit and is_complete else None

    def node_lost(self, now_s: float) -> None:
        """Restores the long deadline, if it was shortened."""
        if self._all_ranks_fit or self._may_be_oversubscribed:
            self._all_ranks_fit = self._may_be_oversubscribed = False
            self.deadline_s = now_s + self.job.deadlines.start_s

    def overdue(self, now_s: float) -> Next:
        """Starts the job with the present nodes if they have room for all ranks, else ends it."""
        wanted, room = self.job.settings.world_size, self.job.processes.room_for_ranks()
        return ToStarting("the job starts") if room >= wanted else ToEnded(verdicts.too_few_nodes(wanted, room))

    def drain_asked(self) -> Next:
        """Ends the job, as there is nothing to save."""
        return ToDraining("training had not begun")


class Starting(JobStage):
    """All ranks start together. Lasts until each of them is at its first step."""

    stage = Stage.STARTING
    prepares_training = True
    needs_rendezvous = True
    starts_spares = True
    reports_standstill = True
    judges_silence = True

    def __init__(self, job: JobState, reason: str, now_s: float) -> None:
        job.progress.is_fresh = True
        job.membership = None  # the loss of a rank would make the whole start-up's exchange invalid
        job.release_snapshots(reason)
        job.processes.start_ranks(reason)
        job.connected.clear()
        deadline_s = now_s + job.deadlines.start_s if job.progress.is_initialised else None
        super().__init__(job, job.roster.holder_numbers(), deadline_s)

    def worker_joined(self, worker: Worker, now_s: float) -> None:
        """Assigns the rank with which the worker was started."""
        super().worker_joined(worker, now_s)
        if worker.rank is not None and not worker.lost:
            self.job.assign(worker, f"rank {worker.rank} was started as such")

    def worker_ready(self, worker: Worker, now_s: float) -> Next:
        """Ends the wait for a rank that is ready in this generation."""
        if ready_now(worker, self.job.generation):
            self.awaited.discard(worker.worker)
        return None

    def proceed(self, now_s: float) -> Next:
        """Sends all ranks, when they are ready, to the greatest step that they all reach."""
        job = self.job
        if self.awaited or job.roster.num_holders != job.settings.world_size:
            return None
        job.membership = job.roster.membership()
        step = reachable_step(job.roster, job.snapshots, job.membership, job.generation)
        if step is None or begins_again(job.progress, job.roster, step, resumes=job.resumes):
            return ToEnded(verdicts.no_checkpoint_found(job.progress.trained_to))
        return ToRecovering(step)

    def left_without(self, silence: Silence) -> Left | None:
        """Gives up silent ranks, which have nothing to lose yet; but not all of them at once, for nothing is gained."""
        is_alone = all(worker.worker in silence.silent for worker in self.job.roster.holders())
        return None if is_alone and silence.node is None else Left.MEMORY

    def overdue(self, now_s: float) -> Next:
        """Stops all ranks of a job that has trained, to find the one that hangs. Ends a job that never trained."""
        late = self.job.roster.ranks_of(self.awaited)
        if not self.job.progress.has_trained:
            return ToEnded(verdicts.start_overdue(late, self.job.deadlines.start_s))
        return self.interrupted(Cause.HANG, f"ranks {late} did not reach their first step in time", (), now_s)

    def drain_asked(self) -> Next:
        """Ends the job, because there is nothing to save but what the newest checkpoint has."""
        has_trained = self.job.progress.has_trained
        return ToDraining(
            "all ranks were restarting from the newest checkpoint" if has_trained else "training had not begun"
        )
