"""The controller's machine: from training, through a recovery, back to training.

`RecoveryMachine` is a function from (state, message, ``now_s``) to effects. It reads no clock, and every deadline is
a field: call `tick` when `next_deadline` has come. Each effect says its reason, and log, journal and tests show it.
"""

from __future__ import annotations

from keepstep.errors import InternalError
from keepstep.protocol import invariants
from keepstep.protocol import messages as msg
from keepstep.protocol.phases import Phase
from keepstep.protocol.records import Failure, RecoveryRecord
from keepstep.protocol.recovery import ending
from keepstep.protocol.recovery.decision import reachable_step, ready_now, recovery_orders
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.stages import TRANSITIONS, Effect, RecoverySettings, Stage
from keepstep.protocol.roster import Roster, Worker

MAX_SPARE_FAILURES = 3
"""How many fresh processes lost in a row, none of which came to its first step, are replaced by another."""


class RecoveryMachine:
    """Decides for one job. Owns the generation number; never touches a tensor."""

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        first = settings.world_size + settings.num_spares
        limit = None if settings.max_restarts is None else first + settings.max_restarts
        self.roster = Roster(settings.world_size, limit)
        self.nodes: list[str] = []
        self.stage = Stage.STARTING
        self.generation = 1
        self.shard_of: dict[int, str] = {}
        self.records: list[RecoveryRecord] = []
        self.digests: dict[int, str] = {}
        self.ended: msg.EndJob | None = None
        self.trained_to = 0
        """The greatest step at which the job is known to have been."""
        self._has_trained = False
        """Whether all ranks ever stood at a step together: before that, a script that fails is at fault itself."""
        self._resume_at = 0
        self._checkpointing = False
        self._deadline_s: float | None = None
        self._without_progress = 0
        self._spare_failures = 0
        self._end_reason: str | None = None
        """Why the job ends, while the ranks rescue their state or their scripts come to their end."""
        self._orders = Orders(self.roster, self.nodes)

    # ---- the two entrances ----------------------------------------------------------------------------------------

    def receive(self, message: msg.Report, now_s: float) -> list[Effect]:
        """One report in, orders out. A report of an older generation is dropped here and nowhere else."""
        generation = getattr(message, "generation", None)
        fenced = generation is not None and not isinstance(message, msg.WorkerReady)
        if self.stage is Stage.ENDED or (fenced and generation != self.generation):
            return []
        self._dispatch(message, now_s)
        return self._flush()

    def tick(self, now_s: float) -> list[Effect]:
        """Acts on a deadline that has come; harmless when none has."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        self._overdue(now_s)
        return self._flush()

    def next_deadline(self) -> float | None:
        """When `tick` is next due, on the clock of ``now_s``; None while nothing is waited for."""
        return self._deadline_s

    def _flush(self) -> list[Effect]:
        invariants.check(self)
        return self._orders.take()

    def _dispatch(self, message: msg.Report, now_s: float) -> None:
        worker = self.roster.workers.get(getattr(message, "worker", -1))
        match message:
            case msg.AgentJoined():
                self._agent_joined(message, now_s)
            case msg.JobStalled():
                self._job_stalled(message, now_s)
            case msg.StoreRequested():
                raise InternalError("store requests are answered by the controller's rendezvous, not by its machine")
            case _:
                if worker is None:
                    return
                self._from_worker(worker, message, now_s)

    def _from_worker(self, worker: Worker, message: msg.Report, now_s: float) -> None:
        match message:
            case msg.AgentJoined() | msg.JobStalled() | msg.StoreRequested():
                raise InternalError(f"{type(message).__name__} comes from no worker")
            case msg.WorkerStarted():
                worker.pid = message.pid
            case msg.WorkerJoined():
                self._joined(worker)
            case msg.WorkerFailed():
                self._failed(worker, message)
            case msg.WorkerLost():
                self._lost(worker, message, now_s)
            case msg.WorkerEnded():
                if worker.rank is not None and self.records:
                    self.records[-1].name_cause(worker.rank, message.cause, message.detail)
            case msg.WorkerFenced():
                worker.gone = True
                self._proceed(now_s)
            case msg.WorkerDone():
                self._done(worker, now_s)
            case msg.StateRescued():
                worker.rescued, worker.rescue_error, worker.answered_rescue = message.path, message.error, True
                self._proceed(now_s)
            case msg.StepObserved():
                self._step_observed(message)
            case msg.CollectiveFailed():
                detail = f"group {message.group}: {message.error}"
                self._interrupt(msg.Cause.COLLECTIVE, f"rank {worker.rank}: {detail}", None, now_s)
            case _ if worker.lost:
                return
            case msg.RankAwaited():
                worker.awaits_rank = True
                self._proceed(now_s)
            case msg.WorkerReady():
                worker.ready = message
                self._checkpointing = message.checkpointing
                self._spare_failures = 0
                self._proceed(now_s)
            case msg.SafePointReached():
                worker.safe = message
                self._proceed(now_s)
            case msg.GroupsReset():
                worker.groups_reset = True
                self._proceed(now_s)
            case msg.StateRecovered():
                worker.recovered = True
                if self.records:
                    self.records[-1].received_bytes += message.received_bytes
                self._proceed(now_s)
            case msg.StepsFinished():
                worker.finished = True
                self.trained_to = max(self.trained_to, message.step)
                if message.digest is not None and worker.rank is not None:
                    self.digests[worker.rank] = message.digest
                self._proceed(now_s)

    # ---- starting -------------------------------------------------------------------------------------------------

    def _agent_joined(self, message: msg.AgentJoined, now_s: float) -> None:
        if self.nodes:
            raise InternalError(f"a second node, {message.node}: one node is supported")
        self.nodes.append(message.node)
        self._start_ranks(now_s, "the job starts")
        self._top_up_spares("the job starts")

    def _start_ranks(self, now_s: float, reason: str) -> None:
        self._enter(Stage.STARTING)
        for rank in range(self.settings.world_size):
            self._start(rank, reason)
        self._deadline_s = now_s + self.settings.start_deadline_s

    def _start(self, rank: int | None, reason: str) -> None:
        self._orders.start(self.roster.add(self.nodes[0], rank), reason)

    def _top_up_spares(self, reason: str) -> None:
        """Brings the number of spares back to what was asked for, as far as the budget goes."""
        missing = self.settings.num_spares - len(self.roster.spares())
        for _ in range(missing):
            if self.roster.may_start() and self._spare_failures <= MAX_SPARE_FAILURES:
                self._start(None, reason)

    def _joined(self, worker: Worker) -> None:
        if worker.rank is not None and not worker.lost and self.stage is Stage.STARTING:
            self._assign(worker, f"rank {worker.rank} was started as such")

    def _assign(self, worker: Worker, reason: str) -> None:
        assert worker.rank is not None
        order = msg.Assign(worker.worker, self.generation, worker.rank, self.settings.world_size)
        self._orders.send(worker.node, order, reason)

    # ---- failures -------------------------------------------------------------------------------------------------

    def _failed(self, worker: Worker, message: msg.WorkerFailed) -> None:
        worker.error = message.error
        if message.fatal or self._fails_in_start_up(worker):
            self._end(ending.failed(worker, message.error))

    def _fails_in_start_up(self, worker: Worker) -> bool:
        """Whether a failing script ends the job: started anew it would fail again, and nothing is lost yet."""
        if worker.rank is None or worker.lost:
            return False
        recoverable = (Stage.STOPPING, Stage.RECOVERING)
        return self.stage is Stage.STARTING or (self.stage in recoverable and not self._has_trained)

    def _lost(self, worker: Worker, message: msg.WorkerLost, now_s: float) -> None:
        if worker.lost:
            worker.gone = worker.gone or message.gone
            self._proceed(now_s)
            return
        in_start_up = message.cause is msg.Cause.EXIT and self._fails_in_start_up(worker)
        worker.lost, worker.gone = True, message.gone
        if worker.rank is not None and message.tag is not None:
            self.trained_to = max(self.trained_to, message.tag.step)
        detail = message.detail if worker.error is None else f"{message.detail}: {worker.error}"
        if not worker.gone:
            self._orders.fence(worker, detail)
        if worker.rank is None:
            self._spare_lost(worker, detail, now_s)
        elif in_start_up:
            self._end(ending.exited_in_start_up(worker, detail))
        elif self.stage is Stage.FINISHED:
            self._lost_after_last_step(worker, detail, now_s)
        elif self.stage is Stage.RESCUING:
            self._proceed(now_s)
        else:
            tag = message.tag
            step, phase = (tag.step, str(tag.phase)) if tag else (None, None)
            cause = msg.Cause.EXCEPTION if worker.error is not None else message.cause
            failure = Failure(worker.rank, cause, detail, step, phase, message.since_s)
            self._interrupt(cause, f"rank {worker.rank} lost: {detail}", failure, now_s)

    def _spare_lost(self, spare: Worker, detail: str, now_s: float) -> None:
        if not spare.ready and not spare.awaits_rank:
            self._spare_failures += 1
        if self.stage in (Stage.TRAINING, Stage.STARTING, Stage.STOPPING):
            self._top_up_spares(f"a spare was lost: {detail}")
        if self._spare_failures > MAX_SPARE_FAILURES and self.stage is Stage.STOPPING:
            self._rescue(now_s, f"{self._spare_failures} fresh processes in a row were lost: {detail}")
        self._proceed(now_s)

    def _job_stalled(self, message: msg.JobStalled, now_s: float) -> None:
        if self.stage is Stage.TRAINING:
            self._interrupt(msg.Cause.STUCK, message.detail, None, now_s)

    def _interrupt(self, cause: msg.Cause, detail: str, failure: Failure | None, now_s: float) -> None:
        """A failure: begins a new generation, or adds to the one whose survivors are just being stopped."""
        if self.stage not in (Stage.STARTING, Stage.TRAINING, Stage.STOPPING, Stage.RECOVERING):
            return
        record = self.records[-1] if self.records else None
        if self.stage is not Stage.STOPPING or record is None:
            if record is not None and self.stage is Stage.RECOVERING:
                record.superseded = True
            self.generation += 1
            self._without_progress += 1
            record = RecoveryRecord(self.generation, cause, detail, now_s)
            self.records.append(record)
            self._enter(Stage.STOPPING)
            self._deadline_s = now_s + self.settings.stop_deadline_s
            for worker in self.roster.workers.values():
                worker.begin_generation()
            synced_step = failure.step if failure is not None and failure.phase == Phase.SYNCED else None
            self._orders.to_holders(lambda holders: msg.Stop(holders, self.generation, detail, synced_step), detail)
        if failure is not None:
            record.add_failure(failure, cause, detail)
        self._proceed(now_s)

    # ---- progress: each stage waits for all of something ------------------------------------------------------------

    def _proceed(self, now_s: float) -> None:
        holders = self.roster.holders()
        match self.stage:
            case Stage.STARTING:
                if len(holders) == self.settings.world_size and all(
                    ready_now(worker, self.generation) for worker in holders
                ):
                    self._decide(now_s)
            case Stage.STOPPING:
                if all(worker.safe for worker in holders) and not self.roster.unfenced():
                    self._stopped(now_s)
            case Stage.RECOVERING:
                self._recovering(holders, now_s)
            case Stage.TRAINING:
                if holders and all(worker.finished for worker in holders):
                    self._complete()
            case Stage.RESCUING:
                if all(worker.answered_rescue for worker in holders):
                    self._end(ending.rescued(self.roster, self._end_reason))
            case Stage.FINISHED:
                if not holders:
                    self._end(ending.scripts_through(self.roster, self._end_reason, self._last_detail()))
            case Stage.ENDED:
                pass

    def _stopped(self, now_s: float) -> None:
        record = self.records[-1]
        if record.stopped_s is None:
            record.stopped_s = now_s
        if self._without_progress > self.settings.max_recoveries_without_progress:
            self._rescue(now_s, f"{self._without_progress} failures in a row without a completed step: {record.detail}")
            return
        if ended_early := ending.ended_early(self.roster):
            self._end(ended_early)
            return
        holders = self.roster.holders()
        if not holders and record.failures and all(failure.cause == msg.Cause.EXCEPTION for failure in record.failures):
            self._end(ending.failed_everywhere(record.detail))
        elif reachable_step(self.roster, self.shard_of, self.generation) is None:
            self._nobody_reaches(now_s)
        elif self._fill_ranks(now_s):
            self._decide(now_s)

    def _nobody_reaches(self, now_s: float) -> None:
        record = self.records[-1]
        if self.trained_to > 0 and not self._checkpointing:
            self._end(ending.nothing_to_recover(self.generation, record.detail))
            return
        reason = "no live rank reaches a step: all ranks start anew"
        for worker in self.roster.holders():
            worker.lost = True
            self._orders.fence(worker, reason)
        if self.roster.unfenced():
            return
        if not self.roster.may_start(self.settings.world_size):
            self._end(ending.restarts_used_up(record.detail))
            return
        record.decided_s = now_s
        self._start_ranks(now_s, reason)

    def _fill_ranks(self, now_s: float) -> bool:
        """Gives every missing rank a warm spare, or none yet where there are too few. True when all are filled."""
        replacements = self.roster.replacements()
        if replacements is None:
            self._wait_for_processes(len(self.roster.missing_ranks()), now_s)
            return False
        for rank, worker in replacements.items():
            worker.rank = rank
            self.records[-1].replacements[rank] = worker.worker
            self._assign(worker, f"spare {worker.worker} takes rank {rank}")
        return True

    def _wait_for_processes(self, num_missing: int, now_s: float) -> None:
        for _ in range(num_missing - len(self.roster.spares())):
            if not self.roster.may_start():
                self._rescue(now_s, f"--max-restarts is used up: {self.records[-1].detail}")
                return
            self._start(None, "no spare is left: a fresh process takes the rank")
        self._deadline_s = now_s + self.settings.start_deadline_s

    # ---- decide and recover -----------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> None:
        holders = self.roster.holders()
        for worker in holders:
            if worker.rank is not None and worker.ready is not None:
                self.shard_of.setdefault(worker.rank, worker.ready.shard)
        step = reachable_step(self.roster, self.shard_of, self.generation)
        if step is None or (step < self.trained_to and self.stage is Stage.STARTING and not self._may_go_back()):
            self._end(ending.no_checkpoint_found(self.trained_to))
            return
        record = self.records[-1] if self.records else None
        if record is not None:
            record.resume_step = step
            record.decided_s = now_s
            record.stopped_at_step = max((worker.safe.step for worker in holders if worker.safe), default=None)
        for worker, order in recovery_orders(holders, self.shard_of, step, self.generation):
            reason = f"resume at step {step}, the greatest that every shard can reach: {order.action}"
            self._orders.send(worker.node, order, reason)
            if record is not None and worker.rank is not None:
                record.actions[worker.rank] = order.action
        self._resume_at = step
        self._enter(Stage.RECOVERING)
        self._deadline_s = now_s + self.settings.recover_deadline_s

    def _may_go_back(self) -> bool:
        return any(worker.ready is not None and worker.ready.snapshots for worker in self.roster.holders())

    def _recovering(self, holders: list[Worker], now_s: float) -> None:
        record = self.records[-1] if self.records else None
        if record is not None and record.reset_s is None and all(worker.groups_reset for worker in holders):
            record.reset_s = now_s
        if not all(worker.recovered for worker in holders):
            return
        if record is not None:
            record.restored_s = now_s
        self.trained_to = max(self.trained_to, self._resume_at)
        self._enter(Stage.TRAINING)
        self._has_trained = True
        self._deadline_s = None
        reason = f"all ranks stand at step {self._resume_at}"
        self._orders.to_holders(lambda workers: msg.Resume(workers, self.generation), reason)

    def _step_observed(self, message: msg.StepObserved) -> None:
        self._without_progress = 0
        self.trained_to = max(self.trained_to, message.step + 1)
        record = self.records[-1] if self.records else None
        if record is not None and record.generation == message.generation:
            record.observe_step(message.at_s, message.step_s)
        if self.stage is Stage.TRAINING:
            self._top_up_spares("a spare took a rank: another is started")

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        self._enter(Stage.FINISHED)
        self._orders.to_holders(
            lambda workers: msg.Complete(workers, self.generation), "all ranks completed the last step"
        )
        for spare in self.roster.spares():
            spare.lost = True
            self._orders.fence(spare, "the last step is complete: it is not needed any more")

    def _done(self, worker: Worker, now_s: float) -> None:
        worker.done = worker.gone = True
        if worker.rank is None:
            self._spare_lost(worker, "its script ended", now_s)
        elif not self.roster.holders():
            self._end(ending.scripts_through(self.roster, self._end_reason, self._last_detail()))
        elif self.stage is Stage.TRAINING:
            self._deadline_s = self._deadline_s or now_s + self.settings.end_deadline_s
        else:
            self._proceed(now_s)

    def _lost_after_last_step(self, worker: Worker, detail: str, now_s: float) -> None:
        reason = f"rank {worker.rank} failed in the code after the last step: {detail}"
        self._end_reason = self._end_reason or reason
        self._orders.to_holders(lambda workers: msg.Abandon(workers, detail), reason)
        self._deadline_s = now_s + self.settings.end_deadline_s
        self._proceed(now_s)

    def _last_detail(self) -> str:
        return self.records[-1].detail if self.records else "no failure was seen"

    def _rescue(self, now_s: float, reason: str) -> None:
        self._enter(Stage.RESCUING)
        self._end_reason = reason
        self._deadline_s = now_s + self.settings.end_deadline_s
        self._orders.to_holders(lambda workers: msg.Rescue(workers, reason), reason)
        self._proceed(now_s)

    def _overdue(self, now_s: float) -> None:
        match self.stage:
            case Stage.STARTING:
                waiting = [worker.rank for worker in self.roster.holders() if not ready_now(worker, self.generation)]
                self._end(ending.start_overdue(waiting, self.settings.start_deadline_s))
            case Stage.STOPPING:
                self._give_up([worker for worker in self.roster.holders() if not worker.safe], now_s)
            case Stage.RECOVERING:
                late = [worker.rank for worker in self.roster.holders() if not worker.recovered]
                # Who waits for a rank that hangs is late as well: all are stopped, and who cannot stop is the one.
                self._interrupt(msg.Cause.HANG, f"ranks {late} did not recover in time", None, now_s)
            case Stage.RESCUING:
                self._end(ending.rescued(self.roster, self._end_reason))
            case Stage.TRAINING:
                if ended_early := ending.ended_early(self.roster):
                    self._end(ended_early)
            case Stage.FINISHED:
                self._end(ending.scripts_overdue(self._end_reason))
            case Stage.ENDED:
                pass

    def _give_up(self, overdue: list[Worker], now_s: float) -> None:
        """A survivor that does not answer in time is itself treated as failed."""
        self._deadline_s = now_s + self.settings.end_deadline_s
        if self.roster.unfenced() and not overdue:
            stuck = [worker.pid for worker in self.roster.unfenced()]
            self._rescue(now_s, f"processes {stuck} cannot be killed, so their ranks cannot be given away")
        elif not overdue:
            self._rescue(now_s, "no replacement came to its first step in time")
        for worker in overdue:
            detail = "it did not come to a safe point in time"
            self._lost(worker, msg.WorkerLost(worker.worker, msg.Cause.HANG, detail, False, None, now_s), now_s)

    def _end(self, order: msg.EndJob) -> None:
        self._enter(Stage.ENDED)
        self._deadline_s = None
        self.ended = order
        self._orders.to_nodes(order, order.reason)

    def _enter(self, stage: Stage) -> None:
        if stage is not self.stage and stage not in TRANSITIONS[self.stage]:
            raise InternalError(f"generation {self.generation}: {self.stage} cannot become {stage}")
        self.stage = stage
