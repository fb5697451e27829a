"""The start of a job: the machine waits for nodes, assigns ranks to them, and waits until all ranks are ready."""

from __future__ import annotations

from keepstep.protocol.messages import Cause
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.stages.decision import begins_again, reachable_step, ready_now
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.transitions import Next, Stage, ToDraining, ToEnded, ToRecovering, ToStarting


class WaitingForNodes(JobStage):
    """Until there is room for what the job starts with: for all ranks and spares, or for the ranks after a while."""

    stage = Stage.STARTING

    def __init__(self, job: JobState) -> None:
        super().__init__(job)
        self._all_ranks_fit = False
        """Whether the stage waits only for nodes that bring room for spares."""
        self._may_be_oversubscribed = False
        """Whether the stage waits only for nodes that make the sharing of devices needless."""

    def node_joined(self, name: str, now_s: float) -> Next:
        """The ranks go to nodes at once where there is room for the spares too."""
        settings, processes = self.job.settings, self.job.processes
        if self.deadline_s is None:
            self.deadline_s = now_s + settings.start_deadline_s
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
        """The wait starts over where it had come to an end soon."""
        if self._all_ranks_fit or self._may_be_oversubscribed:
            self._all_ranks_fit = self._may_be_oversubscribed = False
            self.deadline_s = now_s + self.job.settings.start_deadline_s

    def overdue(self, now_s: float) -> Next:
        """The job starts with the nodes that are there, if they have room for all ranks."""
        wanted, room = self.job.settings.world_size, self.job.processes.room_for_ranks()
        return ToStarting("the job starts") if room >= wanted else ToEnded(verdicts.too_few_nodes(wanted, room))

    def drain_asked(self) -> Next:
        """There is nothing to save."""
        return ToDraining("training had not begun")


class Starting(JobStage):
    """All ranks start together: until each of them stands at its first step."""

    stage = Stage.STARTING
    prepares_training = True
    needs_rendezvous = True
    starts_spares = True
    reports_standstill = True

    def __init__(self, job: JobState, reason: str, now_s: float) -> None:
        job.progress.is_fresh = True
        job.membership = None  # a start-up is one piece: a rank lost in it takes what all exchanged along
        job.release_snapshots(reason)
        job.processes.start_ranks(reason)
        job.connected.clear()
        deadline_s = now_s + job.settings.start_deadline_s if job.progress.is_initialised else None
        super().__init__(job, job.roster.holder_numbers(), deadline_s)

    def worker_joined(self, worker: Worker, now_s: float) -> None:
        """Its rank is known."""
        super().worker_joined(worker, now_s)
        if worker.rank is not None and not worker.lost:
            self.job.orders.assign(worker, self.job.generation, f"rank {worker.rank} was started as such")

    def worker_ready(self, worker: Worker, now_s: float) -> Next:
        """One rank less to wait for."""
        if ready_now(worker, self.job.generation):
            self.awaited.discard(worker.worker)
        return None

    def proceed(self, now_s: float) -> Next:
        """All ranks are ready: they go to the greatest step that they all reach."""
        job = self.job
        if self.awaited or job.roster.num_holders != job.settings.world_size:
            return None
        job.membership = job.roster.membership()
        step = reachable_step(job.roster, job.snapshots, job.membership, job.generation)
        if step is None or begins_again(job.progress, job.roster, step):
            return ToEnded(verdicts.no_checkpoint_found(job.progress.trained_to))
        return ToRecovering(step)

    def overdue(self, now_s: float) -> Next:
        """A job that has trained tries again: all ranks stop, and the one that cannot is the one that hangs."""
        late = self.job.roster.ranks_of(self.awaited)
        if not self.job.progress.has_trained:
            return ToEnded(verdicts.start_overdue(late, self.job.settings.start_deadline_s))
        return self.interrupted(Cause.HANG, f"ranks {late} did not reach their first step in time", (), now_s)

    def drain_asked(self) -> Next:
        """There is nothing to save that the newest checkpoint does not hold."""
        has_trained = self.job.progress.has_trained
        return ToDraining(
            "all ranks were restarting from the newest checkpoint" if has_trained else "training had not begun"
        )
