"""The controller's machine: from training, through a recovery, back to training.

`RecoveryMachine` is a function from (state, message, ``now_s``) to effects. It reads no clock, and every deadline is
a field: call `tick` when `next_deadline` has come. Each effect carries its reason, which log, journal and tests show.

The machine records what each event says about nodes and workers, and asks the current stage for the consequence
(`keepstep.protocol.recovery.stages`). A stage waits until a set of workers is empty, and each event ends with that
check. So the cost of a report does not depend on the world size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import assert_never

from keepstep.errors import InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol import resume
from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.recovery import invariants
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.job import JobState
from keepstep.protocol.recovery.orders import Effect
from keepstep.protocol.recovery.placement.quarantine import Place
from keepstep.protocol.recovery.placement.roster import Worker
from keepstep.protocol.recovery.records import Failure
from keepstep.protocol.recovery.scripts.once import Claims
from keepstep.protocol.recovery.settings import RecoverySettings
from keepstep.protocol.recovery.stages.last import Draining, Finished, JobEnded, Rescuing
from keepstep.protocol.recovery.stages.recovering import Recovering
from keepstep.protocol.recovery.stages.stage import JobStage
from keepstep.protocol.recovery.stages.starting import Starting, WaitingForNodes
from keepstep.protocol.recovery.stages.stopping import Stopping
from keepstep.protocol.recovery.stages.training import Training
from keepstep.protocol.recovery.suspicion import Left, Silence
from keepstep.protocol.recovery.transitions import (
    TRANSITIONS,
    GiveUp,
    Next,
    Stage,
    ToDraining,
    ToEnded,
    ToFinished,
    ToRecovering,
    ToRescuing,
    ToStarting,
    ToStopping,
    ToTraining,
    Transition,
)


class RecoveryMachine:
    """Makes all decisions for one job, and owns its generation number. Not thread-safe."""

    def __init__(self, settings: RecoverySettings) -> None:
        self._job = job = JobState(settings)
        self._stage: JobStage = WaitingForNodes(job)
        self._claims = Claims(job.roster, job.orders)
        self.settings = settings
        self.quarantine = job.quarantine
        self.roster = job.roster
        self.progress = job.progress
        self.standstill = job.standstill
        self.records = job.records
        """The recoveries, oldest first."""
        self.notices = job.notices
        """Sentences for the user on what no recovery and no other event tells, oldest first."""
        self.digests: dict[int, str] = {}
        """rank -> digest of its protected state after the last step."""
        self.ended: msg.EndJob | None = None
        self.node_news: list[str] = []
        """A sentence for each node that was lost, has left, or has joined again, oldest first. Logs have the events."""
        self._gone_nodes: set[str] = set()

    @property
    def stage(self) -> Stage:
        """The current stage of the job."""
        return self._stage.stage

    @property
    def generation(self) -> int:
        """The current generation: 1 at the start, one more with each recovery."""
        return self._job.generation

    @property
    def membership(self) -> msg.Membership | None:
        """The membership of the last generation in which all ranks were ready; None while all ranks start."""
        return self._job.membership

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of the job, for the timeouts that its script has given its groups."""
        return self._job.deadlines

    @property
    def awaited(self) -> set[int]:
        """The rank holders for whose answer the current stage waits."""
        return self._stage.awaited

    # ---- events -----------------------------------------------------------------------------------------------------

    def receive(self, node: str, message: msg.Report, now_s: float) -> list[Effect]:
        """Processes a report of a node, and returns the orders. Of an older generation, only `StepObserved` counts."""
        if isinstance(message, msg.StepObserved) and self.stage is not Stage.ENDED:
            self.progress.completed(message.step, message.generation)
        generation = None if isinstance(message, msg.WorkerReady) else getattr(message, "generation", None)
        if self.stage is Stage.ENDED or generation not in (None, self.generation):
            return []
        self._dispatch(node, message, now_s)
        return self._proceed(now_s)

    def answered(
        self, nodes: Sequence[str], workers: Sequence[Sequence[int]], answer: msg.GroupAnswer, now_s: float
    ) -> list[Effect]:
        """Processes an answer that several nodes have given, each for some of its workers, and returns the orders."""
        if self.stage is Stage.ENDED or answer.generation != self.generation:
            return []
        self._answered(nodes, workers, answer, now_s)
        return self._proceed(now_s)

    def node_lost(self, node: str, why: str, since_s: float, now_s: float, *, is_fault: bool = True) -> list[Effect]:
        """Processes the loss of a node with all its workers, and returns the orders.

        Args:
            node: the node.
            why: the reason, for log and report.
            since_s: when the controller last heard the node.
            now_s: the present time.
            is_fault: False if the node has left by itself; then it does not count for the quarantine.
        """
        if self.stage is Stage.ENDED:
            return []
        if node in self.roster.nodes:
            self._gone_nodes.add(node)
            self.node_news.append(why)
            if is_fault:
                self.quarantine.failed(Place(node), why, now_s)
        lost = self.roster.remove_node(node)
        self._job.snapshots.node_lost(node)
        self._job.expect_no_explanation()
        self._stage.node_lost(now_s)
        if not self.progress.is_initialised and lost:  # before that there are no spares
            self._go(ToEnded(verdicts.exited_in_start_up(lost[0].rank, why, is_initialised=False)), now_s)
            return self._job.orders.take()
        self._act_on_losses(
            [(worker, msg.WorkerLost(worker.worker, msg.Cause.NODE, why, True, None, since_s)) for worker in lost],
            now_s,
        )
        return self._proceed(now_s)

    def left_without_node(self, node: str, silent_nodes: Collection[str]) -> Left | None:
        """Returns what would be left of the job without a silent node; None if that is not known yet.

        Args:
            node: the node.
            silent_nodes: all silent nodes, among them this one.
        """
        holders = self.roster.holders()
        lost = [worker for worker in holders if worker.node == node]
        if not lost:
            return Left.MEMORY
        silent = self._silent(holders, silent_nodes)
        return self._stage.left_without(Silence(lost, silent, (), node, silent_nodes))

    def node_silent(self, node: str, why: str, now_s: float) -> list[Effect]:
        """Stops the ranks of a job that trains, because it is not known what would be left of it without this node."""
        if self.stage is Stage.TRAINING:
            self._go(self._stage.interrupted(msg.Cause.NODE, f"node {node} is silent: {why}", (), now_s), now_s)
        return self._proceed(now_s)

    def restarted(self, now_s: float) -> list[Effect]:
        """Processes the restart of the controller with its journal. It has lost the rendezvous, which was in memory."""
        self._go(self._stage.controller_restarted(now_s), now_s)
        return self._proceed(now_s)

    def tick(self, now_s: float, silent_nodes: Collection[str] = ()) -> list[Effect]:
        """Acts on a deadline that has come, and returns the orders. Does nothing if none has come.

        Args:
            now_s: the present time.
            silent_nodes: nodes that the controller has not heard since the suspicions that are due; see `judges_since`.
        """
        if self.stage is Stage.ENDED:
            return []
        stage, drain_due_s = self._stage, self._job.drain.due_s(self._stage.drain_share)
        self.standstill.tick(now_s)
        has_acted = True
        if drain_due_s is not None and now_s >= drain_due_s:
            self._go(stage.drain_overdue(now_s), now_s)
        elif stage.deadline_s is not None and now_s >= stage.deadline_s:
            stage.deadline_s = None
            self._go(stage.overdue(now_s), now_s)
        else:
            has_acted = False
        if (judge_s := self._judge_next_s()) is not None and now_s >= judge_s:
            self._judge(silent_nodes, now_s)
            has_acted = True
        return self._proceed(now_s) if has_acted else []

    def judges_since(self, now_s: float) -> float | None:
        """Returns when the controller heard of the last suspicion, if it is to judge them now; else None.

        The copies on a node count only if the controller has heard the node since. Otherwise a report that its ranks
        have fallen silent, too, may be on its way.
        """
        judge_s = self._judge_next_s()
        if judge_s is None or now_s < judge_s:
            return None
        return max(each.told_s for each in self._job.suspicions)

    def next_deadline(self) -> float | None:
        """Returns when `tick` is next due; None if there is no deadline."""
        if self.stage is Stage.ENDED:
            return None
        drain_due_s = self._job.drain.due_s(self._stage.drain_share)
        dues = (self._stage.deadline_s, self.standstill.due_s, drain_due_s, self._judge_next_s())
        return min((due for due in dues if due is not None), default=None)

    def drain_asked(self, reason: str, now_s: float) -> list[Effect]:
        """Begins a drain: the job ends soon, at a step that all ranks have completed. A second call has no effect."""
        if self._job.drain.reason is None and self.stage is not Stage.ENDED:
            self._job.drain.begin(reason, now_s)
            self._go(self._stage.drain_asked(), now_s)
        return self._proceed(now_s)

    def called_off(self, order: msg.EndJob, now_s: float) -> list[Effect]:
        """Ends the job with the launcher's order."""
        if self.stage is not Stage.ENDED:
            self._go(ToEnded(order), now_s)
        return self._job.orders.take()

    # ---- from stage to stage ----------------------------------------------------------------------------------------

    def _proceed(self, now_s: float) -> list[Effect]:
        """Ends every event: continues to the next stage if nothing is awaited any more. Returns the event's orders."""
        self.quarantine.release(now_s)
        self._claims.follow()
        while (to := self._stage.proceed(now_s)) is not None:  # the next stage may await nothing either
            self._go(to, now_s)
        return self._job.orders.take()

    # ---- silence ----------------------------------------------------------------------------------------------------

    def _judge(self, silent_nodes: Collection[str], now_s: float) -> None:
        """Gives up the suspected ranks without which the job loses nothing; see `recovery.suspicion`.

        All of them are judged when one of them is due: the others have fallen silent since.
        """
        job, holders = self._job, self.roster.holders()
        job.suspicions.compare(holders, self._stage.busy, now_s)
        silent = self._silent(holders, silent_nodes)
        given_up: list[tuple[Worker, msg.WorkerLost]] = []
        snapshots: msg.SnapshotsByRank = ()
        for suspicion in job.suspicions:
            report = suspicion.report
            worker = job.roster.workers[report.worker]
            if worker.node in silent_nodes:  # its agent may have lifted the suspicion
                continue
            left_behind = (*snapshots, *report.snapshots)
            silence = Silence([*(each for each, _ in given_up), worker], silent, left_behind, None, silent_nodes)
            left = self._stage.left_without(silence)
            if left is None:
                continue
            if job.suspicions.may_fence(suspicion, left, now_s, hears_all=not silent_nodes):
                lost = msg.WorkerLost(report.worker, report.cause, report.detail, False, report.tag, report.since_s)
                given_up.append((worker, lost))
                snapshots = left_behind
            elif not silent_nodes and (why := job.suspicions.explain(worker, left, now_s)) is not None:
                self.standstill.keeps(worker, why, now_s)
        for worker, _ in given_up:
            job.suspicions.given_up(worker.worker)
            self.roster.mark_lost(worker, gone=False)
        if given_up:
            self._act_on_losses(given_up, now_s)
        elif (reason := job.suspicions.ends_job(now_s)) is not None:
            self._go(self._stage.gives_up(reason, now_s), now_s)

    def _silent(self, holders: Collection[Worker], silent_nodes: Collection[str]) -> set[int]:
        """Returns the workers whose copies do not count, because they show no sign of life."""
        silent = {worker.worker for worker in holders if worker.node in silent_nodes}
        return silent | self._job.suspicions.workers | self.standstill.idle()

    def _judge_next_s(self) -> float | None:
        """Returns when suspicions are to be judged; None if there are none."""
        if not self._stage.judges_silence:
            return None
        return self._job.suspicions.next_s

    def _go(self, to: Next, now_s: float) -> None:
        """Carries out a stage's decision: goes to the next stage, and checks the invariants there.

        Raises:
            InternalError: the next stage cannot follow the current one, or an invariant does not hold.
        """
        if isinstance(to, GiveUp):
            self._act_on_losses(to.losses, now_s)
        elif to is not None:
            if to.stage is not self.stage and to.stage not in TRANSITIONS[self.stage]:
                raise InternalError(f"generation {self.generation}: {self.stage} cannot become {to.stage}")
            self._stage = self._begin(to, now_s)
            invariants.check(self.stage, self.generation, self.roster, self.records)

    def _begin(self, to: Transition, now_s: float) -> JobStage:
        job = self._job
        match to:
            case ToStarting():
                return Starting(job, to.reason, now_s)
            case ToStopping():
                return Stopping(job, to, now_s)
            case ToRecovering():
                return Recovering(job, to.step, now_s)
            case ToTraining():
                return Training(job)
            case ToFinished():
                return Finished(job)
            case ToRescuing():
                return Rescuing(job, to.reason, now_s)
            case ToDraining():
                return Draining(job, to.how)
            case ToEnded():
                self.ended = to.order
                return JobEnded(job, to.order)
            case _:
                assert_never(to)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def _dispatch(self, node: str, message: msg.Report, now_s: float) -> None:
        match message:
            case msg.NodeJoined():
                self.roster.add_node(message)
                if node in self._gone_nodes:
                    self._gone_nodes.remove(node)
                    self.node_news.append(f"node {node} has joined again, with room for {message.slots} workers")
                if self._job.told is not None:
                    self._job.orders.send(
                        message.node, msg.MembershipTold(self._job.told), "it joins a job that goes on"
                    )
                self._go(self._stage.node_joined(message.node, now_s), now_s)
            case msg.NodeDraining():
                self._job.processes.close_node(node, message.reason)
                self._stage.room_found(message.reason)
                self._go(self._stage.spread(now_s), now_s)
            case msg.DevicesClosed():
                self._job.processes.close_devices(node, message.devices, message.reason)
                self._stage.room_found(message.reason)
                self._go(self._stage.spread(now_s), now_s)
            case msg.JobStalled():
                self._go(self._stage.job_stalled(message, now_s), now_s)
            case msg.RanksStand():
                if self._stage.reports_standstill:
                    self.standstill.stands(message, now_s)
            case msg.StepObserved():
                self._job.record.observe_step(message.node, message.at_s, message.step_s)
                for phase, first_s in message.first_phases:
                    self._job.first_phases[phase] = max(first_s, self._job.first_phases.get(phase, 0.0))
                self._job.suspicions.completed(message.step)
                # A rank has passed the gradient barrier, so each rank has a snapshot of the resume step.
                self._job.release_snapshots("all ranks have their snapshots again")
                self._go(self._stage.step_observed(now_s), now_s)
            case msg.StoreRequested():
                raise InternalError("store requests are answered by the controller's rendezvous, not by its machine")
            case _ if isinstance(message, msg.GroupAnswer):
                self._answered((node,), (message.workers,), message, now_s)
            case _:
                worker = self.roster.workers.get(message.worker)
                if worker is not None and worker.node == node:
                    self._from_worker(worker, message, now_s)

    def _answered(
        self, nodes: Sequence[str], workers: Sequence[Sequence[int]], message: msg.GroupAnswer, now_s: float
    ) -> None:
        """Records an answer of workers of some nodes. It must be fast: a hundred thousand ranks answer at once."""
        job = self._job
        numbers = self.roster.live_on(nodes, workers)
        if not numbers:
            return
        if type(message) is self._stage.answer:
            self._stage.awaited.difference_update(numbers)
        match message:
            case msg.SafePointReached():
                for number in numbers:
                    self.roster.workers[number].safe = message
                    if message.second_copies:
                        job.snapshots.keeps(self.roster.workers[number], message.second_copies)
                self.progress.reached(min(message.reach, default=0))
            case msg.GroupsReset():
                job.connected.update(numbers)
            case msg.StateRecovered():
                job.record.received_bytes += message.received_bytes * len(numbers)
                if message.from_checkpoint:
                    job.record.read_checkpoint |= {self.roster.workers[number].rank or 0 for number in numbers}
            case msg.Holding() | msg.Drained():
                self._go(self._stage.drain_answered(numbers, message), now_s)
            case msg.StepsFinished():
                self.standstill.finished(numbers, message.step)
                self.progress.reached(message.step)
                if message.digest is not None:
                    ranks = (self.roster.workers[number].rank for number in numbers)
                    self.digests |= {rank: message.digest for rank in ranks if rank is not None}

    def _from_worker(self, worker: Worker, message: msg.WorkerReport | msg.AgentReport, now_s: float) -> None:
        match message:
            case msg.WorkerStarted():
                worker.pid = message.pid
            case msg.WorkerJoined():
                self._stage.worker_joined(worker, now_s)
            case msg.WorkerFailed():
                worker.error = message.error
                if message.fatal or self._is_in_start_up(worker):
                    self._go(ToEnded(verdicts.failed(worker, message.error)), now_s)
            case msg.SnapshotsLeft():
                self._job.snapshots.left(worker, message.snapshots)
            case msg.WorkerLost():
                self._lost(worker, message, now_s)
            case msg.WorkerSuspected() if worker.lost:
                pass  # an agent says it again when ranks stop, perhaps of the one that is given up for it
            case msg.WorkerSuspected() if worker.rank is None:  # a spare holds nothing
                lost = msg.WorkerLost(worker.worker, message.cause, message.detail, False, message.tag, message.since_s)
                self._lost(worker, lost, now_s)
            case msg.WorkerSuspected():
                self._job.suspicions.add(message, now_s)
            case msg.SuspicionLifted():
                self._job.suspicions.lift(worker.worker, now_s)
            case msg.WorkerEnded():
                if worker.rank is not None:
                    self._job.explain_death(worker.rank, message.cause, message.detail)
            case msg.WorkerFenced():
                self.roster.mark_lost(worker, gone=True)
                self._stage.awaited.discard(worker.worker)
                self._stage.room_found("there is room again: a spare is started")
            case msg.WorkerDone():
                self._done(worker, message.steps, now_s)
            case msg.StateMoves():
                self._stage.state_moves(now_s)
            case msg.StateRescued():
                worker.rescued, worker.rescue_error = message.path, message.error
                self._stage.awaited.discard(worker.worker)
            case msg.CollectiveFailed():
                detail = f"rank {worker.rank}: group {message.group}: {message.error}"
                self._go(self._stage.interrupted(msg.Cause.COLLECTIVE, detail, (), now_s), now_s)
            case msg.StateRefused() if not message.is_apart or self._job.settings.ends_apart:
                detail = f"rank {worker.rank}: {message.error}"
                cause = msg.Cause.APART if message.is_apart else msg.Cause.STATE
                self._go(self._stage.interrupted(cause, detail, (), now_s), now_s)
            case msg.CheckpointWritten():
                self._job.has_checkpoint = True
            case msg.OnceRequested() if not worker.lost:
                self._claims.requested(message)
            case msg.RankAwaited() if not worker.lost:
                worker.awaits_rank = True
            case msg.WorkerReady() if not worker.lost:
                worker.ready = message
                self._job.learn_timeout(message.timeout_s)
                self._job.writes_checkpoints, self._job.resumes = message.checkpointing, message.resumes
                self._job.has_checkpoint |= message.checkpointing and bool(message.snapshots)
                self._job.processes.came_up()
                self._go(self._stage.worker_ready(worker, now_s), now_s)
            case _:
                pass

    # ---- losses -----------------------------------------------------------------------------------------------------

    def _is_in_start_up(self, worker: Worker) -> bool:
        """Whether a script's failure ends the job: it would fail again after a restart, and nothing is lost yet."""
        if worker.rank is None or worker.lost or self.progress.has_trained:
            return False
        return self._stage.prepares_training

    def _lost(self, worker: Worker, message: msg.WorkerLost, now_s: float) -> None:
        if worker.rank is not None and message.tag:
            self.progress.reached(min(resume.reach(message.tag.step, message.tag.phase), default=0))
        if worker.lost or worker.done:
            self.roster.mark_lost(worker, gone=message.gone)
            return
        is_initialised = self.progress.is_initialised
        has_exited = message.cause in (msg.Cause.EXIT, msg.Cause.DIED)
        ends_job = (has_exited or not is_initialised) and self._is_in_start_up(worker)
        self.roster.mark_lost(worker, gone=message.gone)
        if ends_job:
            detail = worker.explain(message.detail)
            order = verdicts.exited_in_start_up(worker.rank, detail, is_initialised=is_initialised)
            self._go(ToEnded(order), now_s)
        else:
            self._act_on_losses([(worker, message)], now_s)

    def _act_on_losses(self, lost: Iterable[tuple[Worker, msg.WorkerLost]], now_s: float) -> None:
        """Carries out the consequences of workers lost at one moment. They are marked as lost already."""
        failures: list[Failure] = []
        spares: list[tuple[Worker, msg.WorkerLost]] = []
        for worker, message in lost:
            self._stage.awaited.discard(worker.worker)
            self._job.snapshots.forget(worker)
            detail = worker.explain(message.detail)
            device = self.roster.device_of(worker)
            is_blamed = message.cause not in (msg.Cause.NODE, msg.Cause.MOVED) and self._stage.blames_places
            if is_blamed and device is not None:
                self.quarantine.failed(device, detail, now_s)
            if not worker.gone:
                self._job.orders.fence(worker, detail)
            if worker.rank is None:
                spares.append((worker, message))
            else:
                cause = msg.Cause.EXCEPTION if worker.error is not None else message.cause
                step, phase = (message.tag.step, str(message.tag.phase)) if message.tag else (None, None)
                failures.append(Failure(worker.rank, cause, detail, step, phase, message.since_s))
        if failures:
            self._go(self._stage.ranks_lost(failures, now_s), now_s)
        for spare, message in spares:
            self._spare_lost(spare, message.cause, spare.explain(message.detail), now_s)

    def _spare_lost(self, spare: Worker, cause: msg.Cause, detail: str, now_s: float) -> None:
        if not spare.ready and not spare.awaits_rank and cause is not msg.Cause.NODE:
            self._job.processes.lost_before_ready(detail)
        self._go(self._stage.spare_lost(detail, now_s), now_s)

    def _done(self, worker: Worker, completed_steps: int | None, now_s: float) -> None:
        if worker.lost:
            self.roster.mark_gone(worker)
            return
        self.roster.mark_done(worker, completed_steps)
        self._stage.awaited.discard(worker.worker)
        if worker.rank is None:
            self._spare_lost(worker, msg.Cause.EXIT, "its script ended", now_s)
        else:
            self._go(self._stage.script_ended(now_s), now_s)
