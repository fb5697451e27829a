"""The controller's machine: from training, through a recovery, back to training.

`RecoveryMachine` is a function from (state, message, ``now_s``) to effects. It reads no clock, and every deadline is
a field: call `tick` when `next_deadline` has come. Each effect says its reason, and log, journal and tests show it.

What a stage waits for is a set of workers that becomes empty, and each event ends by asking whether it has: so a report
costs the same whatever the world size.
"""

from __future__ import annotations

from keepstep.errors import InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol import resume
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import invariants
from keepstep.protocol.recovery.decision import begins_again, decide, reachable_step, ready_now
from keepstep.protocol.recovery.end import verdicts
from keepstep.protocol.recovery.end.draining import Draining
from keepstep.protocol.recovery.end.ending import Ending
from keepstep.protocol.recovery.once import Claims
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.gathering import Gathering
from keepstep.protocol.recovery.placement.processes import Processes
from keepstep.protocol.recovery.placement.quarantine import Place, Quarantine
from keepstep.protocol.recovery.placement.replacing import Replacing
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.recovery.records import Failure, RecoveryRecord
from keepstep.protocol.recovery.stages import Course, Effect, RecoverySettings, Stage
from keepstep.protocol.recovery.standstill import Standstill


class RecoveryMachine(Course):
    """Decides for one job. Owns the generation number; never touches a tensor."""

    def __init__(self, settings: RecoverySettings) -> None:
        super().__init__()
        self.settings = settings
        self.quarantine = Quarantine(settings.quarantine_failures, settings.quarantine_window_s)
        self.roster = Roster(settings, self.quarantine)
        self.membership: msg.Membership | None = None
        """Of the last generation in which all ranks stood ready; None while all start."""
        self.records: list[RecoveryRecord] = []
        self.digests: dict[int, str] = {}
        self.progress = Progress()
        self.standstill = Standstill(self, self.roster)
        self._connected: set[int] = set()
        """The rank holders whose groups are connected in this generation."""
        self._checkpointing = False
        self._record = RecoveryRecord(self.generation, "start", "no failure was seen", 0.0)
        """What happens in this generation. That of the first is in no list: nothing is recovered from there."""
        self._orders = Orders()
        self._processes = Processes(settings, self.roster, self._orders)
        self._claims = Claims(self.roster, self._orders)
        self._gathering = Gathering(settings, self, self._processes)
        self._ending = Ending(self, self.roster, self._orders, self.progress, settings.end_deadline_s)
        self._replacing = Replacing(settings, self, self.roster, self._orders, self._processes, self._ending)
        self._draining = Draining(self, self.roster, self._orders, self._ending, settings.grace_s)

    # ---- the entrances ----------------------------------------------------------------------------------------------

    def receive(self, node: str, message: msg.Report, now_s: float) -> list[Effect]:
        """One report of a node in, orders out. Of an older generation only this is heard: that a step was completed."""
        if isinstance(message, msg.StepObserved) and self.stage is not Stage.ENDED:
            self.progress.completed(message.step, message.generation)
        generation = None if isinstance(message, msg.WorkerReady) else getattr(message, "generation", None)
        if self.stage is Stage.ENDED or generation not in (None, self.generation):
            return []
        self._dispatch(node, message, now_s)
        return self._proceed(now_s)

    def node_lost(self, node: str, why: str, since_s: float, now_s: float, *, is_fault: bool = True) -> list[Effect]:
        """A node was given up, or left, with everything on it. What still runs there is of an old generation."""
        if self.stage is Stage.ENDED:
            return []
        if is_fault and node in self.roster.nodes:
            self.quarantine.failed(Place(node), why, now_s)
        lost = self.roster.remove_node(node)
        self._gathering.lost(now_s)
        if not self.progress.is_initialised and lost:  # before that there are no spares
            self._ending.exited_in_start_up(lost[0], why)
            return self._orders.take()
        self._act_on_losses(
            [(worker, msg.WorkerLost(worker.worker, msg.Cause.NODE, why, True, None, since_s)) for worker in lost],
            now_s,
        )
        return self._proceed(now_s)

    def restarted(self, now_s: float) -> list[Effect]:
        """The controller is back after a crash, with its journal: what was lost is the rendezvous of the ranks."""
        if self.deadline_s is not None:
            self.deadline_s = max(self.deadline_s, now_s + self.settings.end_deadline_s)
        if self._gathering.is_over and self.stage in (Stage.STARTING, Stage.RECOVERING):
            self._interrupt(msg.Cause.CONTROLLER, "the controller was restarted", [], now_s)
        return self._proceed(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Acts on a deadline that has come; harmless when none has."""
        self.standstill.tick(now_s)
        if (due_s := self._draining.due_s) is not None and now_s >= due_s:
            if self._draining.overdue():
                self._interrupt(msg.Cause.DRAIN, "the ranks did not come to one step by themselves", [], now_s)
        elif self.deadline_s is not None and now_s >= self.deadline_s:
            self.deadline_s = None
            self._overdue(now_s)
        else:
            return []
        return self._proceed(now_s)

    def next_deadline(self) -> float | None:
        """When `tick` is next due; None while nothing is waited for."""
        dues = (self.deadline_s, None if self.stage is Stage.ENDED else self.standstill.due_s, self._draining.due_s)
        return min((due for due in dues if due is not None), default=None)

    def drain_asked(self, reason: str, now_s: float) -> list[Effect]:
        """The job is to end soon, at a step that all ranks have come to."""
        self._draining.begin(reason, now_s, has_trained=self.progress.has_trained)
        return self._proceed(now_s)

    def called_off(self, order: msg.EndJob) -> list[Effect]:
        """The launcher wants the job ended."""
        if self.stage is not Stage.ENDED:
            self._ending.end(order)
        return self._orders.take()

    def enter(self, stage: Stage, awaited: set[int], deadline_s: float | None) -> None:
        """Goes on to a stage, and checks everything that must hold."""
        super().enter(stage, awaited, deadline_s)
        invariants.check(self)

    def _dispatch(self, node: str, message: msg.Report, now_s: float) -> None:
        match message:
            case msg.NodeJoined():
                self._node_joined(message, now_s)
            case msg.JobStalled():
                if self.stage is Stage.TRAINING and self.standstill.stalled(message.node):
                    self._interrupt(msg.Cause.STUCK, self.standstill.explained(message.detail, now_s), [], now_s)
            case msg.RanksStand():
                self.standstill.stands(message, now_s)
            case msg.StepObserved():
                self._step_observed(message, now_s)
            case msg.StoreRequested():
                raise InternalError("store requests are answered by the controller's rendezvous, not by its machine")
            case msg.NodeDraining():
                self._replacing.close_node(node, message.reason)
                self._there_is_room(message.reason)
                self._spread(now_s)
            case _ if isinstance(message, msg.GroupAnswer):
                self._answered(node, message)
            case _:
                worker = self.roster.workers.get(message.worker)
                if worker is not None and worker.node == node:
                    self._from_worker(worker, message, now_s)

    def _answered(self, node: str, message: msg.GroupAnswer) -> None:
        """An answer that all ranks give, for those of one node: a hundred thousand of them come at once."""
        known = self.roster.workers
        speakers = [known[number] for number in message.workers if number in known]
        speakers = [worker for worker in speakers if worker.node == node and not worker.lost]
        if not speakers:
            return
        numbers = [worker.worker for worker in speakers]
        match message:
            case msg.SafePointReached():
                for worker in speakers:
                    worker.safe = message
                self.progress.reached(min(message.reach, default=0))
                self._answered_in(Stage.STOPPING, numbers)
            case msg.GroupsReset():
                self._connected.update(numbers)
            case msg.StateRecovered():
                self._record.received_bytes += message.received_bytes * len(numbers)
                self._answered_in(Stage.RECOVERING, numbers)
            case msg.Holding() | msg.Drained():
                self._draining.answered(message)
            case msg.StepsFinished():
                self._answered_in(Stage.TRAINING, numbers)
                self.standstill.finished(numbers, message.step)
                self.progress.reached(message.step)
                if message.digest is not None:
                    self.digests |= {worker.rank: message.digest for worker in speakers if worker.rank is not None}

    def _answered_in(self, stage: Stage, numbers: list[int]) -> None:
        if self.stage is stage:
            self.awaited.difference_update(numbers)

    def _from_worker(self, worker: Worker, message: msg.WorkerReport | msg.AgentReport, now_s: float) -> None:
        match message:
            case msg.WorkerStarted():
                worker.pid = message.pid
            case msg.WorkerJoined():
                self._joined(worker, now_s)
            case msg.WorkerFailed():
                self._failed(worker, message)
            case msg.WorkerLost():
                self._lost(worker, message, now_s)
            case msg.WorkerEnded():
                if worker.rank is not None:
                    self._record.name_cause(worker.rank, message.cause, message.detail)
            case msg.WorkerFenced():
                self.roster.mark_lost(worker, gone=True)
                self.awaited.discard(worker.worker)
                self._there_is_room("there is room again: a spare is started")
            case msg.WorkerDone():
                self._done(worker, message.steps, now_s)
            case msg.StateRescued():
                worker.rescued, worker.rescue_error = message.path, message.error
                self.awaited.discard(worker.worker)
            case msg.CollectiveFailed():
                detail = f"group {message.group}: {message.error}"
                self._interrupt(msg.Cause.COLLECTIVE, f"rank {worker.rank}: {detail}", [], now_s)
            case msg.OnceRequested() if not worker.lost:
                self._claims.requested(message)
            case msg.RankAwaited() if not worker.lost:
                worker.awaits_rank = True
            case msg.WorkerReady() if not worker.lost:
                self._ready(worker, message, now_s)
            case _:
                pass

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _node_joined(self, message: msg.NodeJoined, now_s: float) -> None:
        self.roster.add_node(message)
        if self._gathering.is_over:
            self._there_is_room(f"node {message.node} has joined")
        elif self._gathering.joined(now_s):
            self._start_job(now_s)

    def _there_is_room(self, reason: str) -> None:
        """In a recovery, ranks come first: what they need is started as it goes on, and spares when all train again."""
        if self.stage in (Stage.STARTING, Stage.TRAINING) and self.progress.is_initialised:
            self._processes.top_up_spares(reason)

    def _start_job(self, now_s: float) -> None:
        self._gathering.is_over = True
        self._start_ranks(now_s, "the job starts")

    def _start_ranks(self, now_s: float, reason: str) -> None:
        self.progress.is_fresh = True
        self.membership = None  # a start-up is one piece: a rank lost in it takes what all exchanged along
        self._processes.start_ranks(reason)
        self._connected.clear()
        deadline_s = now_s + self.settings.start_deadline_s if self.progress.is_initialised else None
        self.enter(Stage.STARTING, self.roster.holder_numbers(), deadline_s)

    def _joined(self, worker: Worker, now_s: float) -> None:
        if not self.progress.is_initialised:  # a spare that runs a script which never joins would meet its ranks
            self.progress.is_initialised, self.deadline_s = True, now_s + self.settings.start_deadline_s
            self._processes.top_up_spares("the job starts")
        if worker.rank is not None and not worker.lost and self.stage is Stage.STARTING:
            self._orders.assign(worker, self.generation, f"rank {worker.rank} was started as such")

    def _ready(self, worker: Worker, message: msg.WorkerReady, now_s: float) -> None:
        worker.ready = message
        self._checkpointing = message.checkpointing
        self._processes.came_up()
        if self.stage is Stage.STARTING and ready_now(worker, self.generation):
            self.awaited.discard(worker.worker)
        self._spread(now_s)

    def _spread(self, now_s: float) -> None:
        """A rank that shares a device, or whose node is to leave, goes to a warm spare that has a place of its own."""
        if self.stage is Stage.TRAINING and self.membership is not None:
            self._act_on_losses(self._replacing.move(self.membership, now_s), now_s)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _failed(self, worker: Worker, message: msg.WorkerFailed) -> None:
        worker.error = message.error
        if message.fatal or self._ending.is_in_start_up(worker):
            self._ending.end(verdicts.failed(worker, message.error))

    def _lost(self, worker: Worker, message: msg.WorkerLost, now_s: float) -> None:
        if worker.rank is not None and message.tag:
            self.progress.reached(min(resume.reach(message.tag.step, message.tag.phase), default=0))
        if worker.lost or worker.done:
            self.roster.mark_lost(worker, gone=message.gone)
            return
        ends_job = message.cause is msg.Cause.EXIT or not self.progress.is_initialised
        in_start_up = ends_job and self._ending.is_in_start_up(worker)
        self.roster.mark_lost(worker, gone=message.gone)
        if in_start_up:
            self._ending.exited_in_start_up(worker, worker.explain(message.detail))
        else:
            self._act_on_losses([(worker, message)], now_s)

    def _act_on_losses(self, lost: list[tuple[Worker, msg.WorkerLost]], now_s: float) -> None:
        """What the loss of workers at one moment, marked as lost already, gives rise to."""
        failures: list[Failure] = []
        for worker, message in lost:
            self.awaited.discard(worker.worker)
            detail = worker.explain(message.detail)
            if message.cause not in (msg.Cause.NODE, msg.Cause.MOVED) and self.stage is not Stage.DRAINING:
                self.quarantine.failed(Place(worker.node, worker.device), detail, now_s)
            if not worker.gone:
                self._orders.fence(worker, detail)
            if worker.rank is not None:
                cause = msg.Cause.EXCEPTION if worker.error is not None else message.cause
                step, phase = (message.tag.step, str(message.tag.phase)) if message.tag else (None, None)
                failures.append(Failure(worker.rank, cause, detail, step, phase, message.since_s))
        if failures and self.stage is Stage.FINISHED:
            self._ending.lost_after_last_step(failures[0], now_s)
        elif failures:
            who = f"rank {failures[0].rank}" if len(failures) == 1 else f"ranks {[each.rank for each in failures]}"
            self._interrupt(failures[0].cause, f"{who} lost: {failures[0].detail}", failures, now_s)
        for spare, message in lost:
            if spare.rank is None:
                self._spare_lost(spare, message.cause, spare.explain(message.detail), now_s)

    def _spare_lost(self, spare: Worker, cause: msg.Cause, detail: str, now_s: float) -> None:
        if not spare.ready and not spare.awaits_rank and cause is not msg.Cause.NODE:
            self._processes.lost_before_ready()
        if self.stage in (Stage.STARTING, Stage.TRAINING, Stage.STOPPING):
            self._processes.top_up_spares(f"a spare was lost: {detail}")
        if self._processes.keep_failing and self.stage is Stage.STOPPING:
            self._ending.rescue(f"fresh processes are lost one after the other: {detail}", now_s)

    def _interrupt(self, cause: str, detail: str, failures: list[Failure], now_s: float) -> None:
        """A failure: begins a new generation, or adds to the one whose survivors are just being stopped."""
        if self.stage not in (Stage.STARTING, Stage.TRAINING, Stage.STOPPING, Stage.RECOVERING):
            return
        if self.stage is not Stage.STOPPING:
            self._record.superseded = self.stage is Stage.RECOVERING
            self.generation += 1
            self._record = RecoveryRecord(self.generation, cause, detail, now_s)
            self._connected.clear()
            self.standstill.clear()
            self._draining.interrupted()
            for worker in self.roster.holders():
                worker.safe = None
            self.enter(Stage.STOPPING, self.roster.holder_numbers(), now_s + self.settings.stop_deadline_s)
            synced_step = next((each.step for each in failures if each.phase == Phase.SYNCED), None)
            self._orders.to_all(msg.Stop(self.generation, detail, synced_step), detail)
        if self._record not in self.records[-1:] and (failures or cause != msg.Cause.DRAIN):
            self.records.append(self._record)
        for failure in failures:
            self._record.add_failure(failure, cause, detail)
            self.deadline_s = max(self.deadline_s or 0.0, now_s + self.settings.end_deadline_s)  # its fence takes time

    # ---- progress: each stage waits for all of something ------------------------------------------------------------

    def _proceed(self, now_s: float) -> list[Effect]:
        """The end of every event: the stage goes on when it has all that it waits for. Returns the event's orders."""
        self.quarantine.release(now_s)
        self._claims.follow()
        match self.stage:
            case Stage.STARTING:
                if self._gathering.is_over and not self.awaited and self.roster.num_holders == self.settings.world_size:
                    self._all_stand_ready(now_s)
            case Stage.STOPPING:
                if not self.awaited and not self.roster.unfenced():
                    self._stopped(now_s)
            case Stage.RECOVERING:
                if self._record.reset_s is None and len(self._connected) >= self.settings.world_size:
                    self._record.reset_s = now_s
                if not self.awaited:
                    self._recovered(now_s)
            case Stage.TRAINING:
                if not self.awaited and self.roster.num_holders:
                    self._ending.complete()
                elif uneven := self.standstill.uneven():
                    self._ending.end(verdicts.uneven_steps(uneven))
            case Stage.FINISHED | Stage.RESCUING:
                self._ending.proceed(self._record.detail)
            case Stage.DRAINING:
                self._draining.proceed()
            case Stage.ENDED:
                pass
        return self._orders.take()

    def _stopped(self, now_s: float) -> None:
        record = self._record
        record.stopped_s = record.stopped_s or now_s
        if (idle := self.generation - self.progress.last_generation) > self.settings.max_recoveries_without_progress:
            self._ending.rescue(f"{idle} failures in a row without a completed step: {record.detail}", now_s)
        elif ended_early := verdicts.ended_early(self.roster):
            self._ending.end(ended_early)
        elif record.num_exceptions == self.settings.world_size:
            self._ending.end(verdicts.failed_everywhere(record.detail))
        elif (step := reachable_step(self.roster, self.membership, self.generation)) is None:
            self._no_step_is_reached(now_s)
        elif begins_again(self.progress, self.roster, step):
            self._ending.end(verdicts.no_checkpoint_found(self.progress.trained_to))
        elif self._replacing.fill_ranks(record, now_s, self._draining.reason):
            self._decide(step, now_s)

    def _no_step_is_reached(self, now_s: float) -> None:
        if self.progress.trained_to > 0 and not self._checkpointing:
            self._ending.end(verdicts.nothing_to_recover(self.generation, self._record.detail))
            return
        if self._draining.reason is not None:
            self._ending.end(verdicts.drained_in_vain(str(self._draining.reason), self._record.detail))
            return
        reason = "no live rank reaches a step: all ranks start anew"
        self._processes.fence_ranks(reason)
        self._processes.fence_spares()
        if self.roster.unfenced():
            return
        if not self.roster.may_start(self.settings.world_size):
            self._ending.end(verdicts.restarts_used_up(self._record.detail))
            return
        if self._processes.room_for_ranks() < self.settings.world_size:
            self._replacing.wait_for_help(now_s)  # another node has to come
            return
        self._record.decided_s = now_s
        self._start_ranks(now_s, reason)

    # ---- decide and recover -----------------------------------------------------------------------------------------

    def _all_stand_ready(self, now_s: float) -> None:
        self.membership = self.roster.membership(None)
        step = reachable_step(self.roster, self.membership, self.generation)
        if step is None or begins_again(self.progress, self.roster, step):
            self._ending.end(verdicts.no_checkpoint_found(self.progress.trained_to))
        else:
            self._decide(step, now_s)

    def _decide(self, step: int, now_s: float) -> None:
        self.membership = self.roster.membership(self.membership)
        decision = decide(self.roster, self.membership, step, self.generation)
        record = self._record
        record.resume_step = step
        record.decided_s = now_s
        record.stopped_at_step = max((w.safe.step for w in self.roster.holders() if w.safe), default=None)
        record.actions |= decision.actions
        self.progress.resumes(step, self.generation)
        self.enter(Stage.RECOVERING, self.roster.holder_numbers(), now_s + self.settings.recover_deadline_s)
        reason = f"resume at step {step}, where every shard can be"
        self._orders.to_all(msg.Recover(self.generation, step, decision.transfers, self.membership), reason)

    def _recovered(self, now_s: float) -> None:
        self._record.restored_s = now_s
        self.progress.stands()
        self.standstill.all_move()
        self.enter(Stage.TRAINING, self.roster.holder_numbers(), None)
        if self._draining.stands(self.progress.resume_at):
            return
        self._orders.to_all(msg.Resume(self.generation), f"all ranks stand at step {self.progress.resume_at}")

    def _step_observed(self, message: msg.StepObserved, now_s: float) -> None:
        self._record.observe_step(message.node, message.at_s, message.step_s)
        if self.stage is Stage.TRAINING:
            self._processes.top_up_spares("a spare took a rank: another is started")
            self._spread(now_s)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _done(self, worker: Worker, completed_steps: int | None, now_s: float) -> None:
        if worker.lost:
            self.roster.mark_gone(worker)
            return
        self.roster.mark_done(worker, completed_steps)
        self.awaited.discard(worker.worker)
        if worker.rank is None:
            self._spare_lost(worker, msg.Cause.EXIT, "its script ended", now_s)
        elif self.stage is Stage.DRAINING:
            pass
        elif not self.roster.num_holders:
            self._ending.through(self._record.detail)
        elif self.stage is Stage.TRAINING:
            self.deadline_s = self.deadline_s or now_s + self.settings.end_deadline_s

    def _overdue(self, now_s: float) -> None:
        late = self.roster.ranks_of(self.awaited)
        match self.stage:
            case Stage.STARTING if not self._gathering.is_over:
                if self._processes.room_for_ranks() >= self.settings.world_size:
                    self._start_job(now_s)
                else:
                    order = verdicts.too_few_nodes(self.settings.world_size, self._processes.room_for_ranks())
                    self._ending.end(order)
            case Stage.STARTING if not self.progress.has_trained:
                self._ending.end(verdicts.start_overdue(late, self.settings.start_deadline_s))
            case Stage.STOPPING:
                self._give_up([self.roster.workers[number] for number in sorted(self.awaited)], now_s)
            case Stage.STARTING | Stage.RECOVERING:
                # Who waits for a rank that hangs is late as well: all are stopped, and who cannot stop is the one.
                what = "come to their first step" if self.stage is Stage.STARTING else "recover"
                self._interrupt(msg.Cause.HANG, f"ranks {late} did not {what} in time", [], now_s)
            case Stage.TRAINING:
                if ended_early := verdicts.ended_early(self.roster):
                    self._ending.end(ended_early)
            case Stage.FINISHED | Stage.RESCUING:
                self._ending.overdue()
            case Stage.DRAINING | Stage.ENDED:
                pass

    def _give_up(self, overdue: list[Worker], now_s: float) -> None:
        """A survivor that does not answer in time is itself treated as failed."""
        if self.roster.unfenced() and not overdue:
            stuck = [worker.pid for worker in self.roster.unfenced()]
            self._ending.rescue(f"processes {stuck} cannot be killed, so their ranks cannot be given away", now_s)
        elif not overdue:
            self._ending.rescue("no replacement came to its first step in time", now_s)
        for worker in overdue:
            detail = "it did not come to a safe point in time"
            self._lost(worker, msg.WorkerLost(worker.worker, msg.Cause.HANG, detail, False, None, now_s), now_s)
