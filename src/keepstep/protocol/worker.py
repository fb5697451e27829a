"""The worker's machine: the state of one process of the job, its reports, and its next move.

Two threads of a worker use it. The listener passes it orders (`receive`) as they arrive, and performs at once what
cannot wait. The training thread asks for its next move at its safe points (`next_move`), performs it, and reports the
result. The table of a step's phases is in `keepstep.protocol.phases`.
"""

from __future__ import annotations

import enum

from keepstep.errors import LocalProtocolError, RemoteProtocolError
from keepstep.protocol import messages as msg
from keepstep.protocol import resume
from keepstep.protocol.moves import (
    Build,
    Connect,
    End,
    Load,
    Move,
    Save,
    SaveAndEnd,
    SendReport,
    Train,
    Undo,
    Update,
    Wait,
)
from keepstep.protocol.phases import Phase, StepEvent, StepMachine
from keepstep.protocol.resume import Action


class WorkerState(enum.StrEnum):
    """What the training thread does or waits for."""

    LAUNCHED = "launched"
    JOINING = "joining"
    CONNECTING = "connecting"
    BUILDING = "building"
    READY = "ready"
    STANDING = "standing"
    LOADING = "loading"
    RECOVERED = "recovered"
    TRAINING = "training"
    SAVING = "saving"
    DRAINED = "drained"
    FINISHED = "finished"
    COMPLETE = "complete"


WAITS_FOR_ORDERS = frozenset(
    {WorkerState.JOINING, WorkerState.READY, WorkerState.STANDING, WorkerState.RECOVERED, WorkerState.FINISHED}
)


class Urgency(enum.Enum):
    """What the listener thread must do at once on an order."""

    NONE = enum.auto()
    BREAK = enum.auto()
    """Break the communicators."""
    SETTLE = enum.auto()
    """Break them when the backward has ended, or its time is over. Call `settled` then."""


class WorkerMachine:
    """One worker, from its start to its end. The machine touches no tensor and reads no clock.

    Between two events, these invariants of its generation numbers hold (`tests/sim/test_worker_fields.py`)::

        _failed_generation  <=  generation  <=  _target  <=  target_generation
        _completed  <=  _resumed  <=  generation  <=  _order.generation
        _reported  <=  max(_stop_generation, _target)
        _advanced  <=  _stop_generation

    None of them decreases, except ``_target``: it falls back to ``generation`` if a start-up ends without its peers.
    """

    boundary: int | None = None
    """The number of the last boundary of an epoch to which this rank has come; it makes its deferred calls there, and
    is synced when it has made them."""
    _synced_step: int | None = None
    """See the last `Stop`."""

    def __init__(self, worker: int, pid: int, rank: int | None) -> None:
        self.worker, self.rank, self._pid = worker, rank, pid
        self.steps = StepMachine()
        self.state = WorkerState.LAUNCHED
        self.generation = 0
        """The generation whose groups this rank has connected; 0 before the first."""
        self.used_echo = False
        """Whether a collective was echoed since the groups were last connected."""
        self.partially_updated = False
        """Whether the parameters are between two steps: the reach is empty."""
        self.in_doubt = False
        """Whether a wrong value may be in the state. The copy counts as partially updated until `found_whole`."""
        self.doubt: str | None = None
        """See `msg.SafePointReached`. The copy counts as partially updated until `msg.DoubtLifted`."""
        self._flaw: str | None = None
        """Why it last counted as partially updated."""
        self.communicates_in_update = False
        """Whether the script has run a collective after the gradient barrier."""
        self.stopped_in: tuple[int, Phase] | None = None
        """Step and phase in which this rank was interrupted; None once its groups are connected again."""
        self.assignment: msg.Assign | None = None
        """The last `Assign`: the rank of this worker, and its local rank."""
        self.membership: msg.Membership | None = None
        """The membership of the current generation, or of the one to which this rank recovers."""
        self.replaced: frozenset[int] = frozenset()
        """The ranks whose worker has changed since the groups were last connected, by the `Recover` orders so far."""
        self._stop_generation = 0
        """The newest generation that a `Stop` has begun; 0 before the first `Stop`."""
        self._failed_generation = -1
        """The last generation in which a collective of this rank failed; -1 if none has."""
        self._settling: int | None = None
        """``_stop_generation`` while that `Stop` waits for the end of the backward; else None."""
        self._target = 0
        """The generation that this rank connects, or connected last. Above ``generation`` until all groups are."""
        self._reported = 0
        """The newest generation for which this rank has reported its safe point, or out of which it fell."""
        self._snapshots: tuple[int, ...] = ()
        """The steps of the snapshots and checkpoints that this rank can load."""
        self._second_copies: msg.SnapshotsByRank = ()
        self.inherited: list[msg.InheritSnapshots] = []
        """Snapshots in other memory of the node, to load or to send. The shell removes the entries."""
        self._order: msg.Recover | None = None
        """The `Recover` order: that of ``generation`` from loading to training, of a newer one while standing."""
        self._advanced = 0
        """The newest generation in which this rank had to run the update for which it was synced; 0 if none."""
        self._resumed = self._completed = 0
        """The newest generations with a `Resume`, and with a `Complete`."""
        self._rescue: msg.Rescue | None = None
        self._hold: msg.Holding | None = None
        """The answer of this rank to the last `Hold`."""
        self._unsent: msg.Holding | None = None
        """``_hold`` until it is sent."""
        self._next_stop = 0
        """The step before which the training thread next calls `next_move`: the current one or the next."""
        self._drain: msg.Drain | None = None
        self.terminated = False
        """Whether a `Terminate` has come: the agent sends SIGTERM to the script, and the job ends."""
        self._started = False
        """Whether the script has reached its first step."""
        self._sayings: list[msg.WorkerReport] = []

    # ---- the listener -----------------------------------------------------------------------------------------------

    def receive(self, order: msg.WorkerOrder) -> Urgency:
        """Records an order, in the listener thread. Returns what the listener must do at once.

        Raises:
            RemoteProtocolError: a `Recover` order without the complete membership.
        """
        match order:
            case msg.Assign():
                self.assignment, self.rank = order, order.rank
            case msg.InheritSnapshots():
                self.inherited.append(order)
                if self.rank in (None, order.rank):  # else this rank must send them, not load them
                    self._snapshots = tuple(sorted({*self._snapshots, *order.steps}))
            case msg.Stop() if order.generation > self._stop_generation:
                return self._stop(order)
            case msg.DoubtLifted() if self.worker in order.workers and self.doubt is not None:
                self.partially_updated, self.doubt = False, None
            case msg.Recover() if order.generation >= self._stop_generation:
                if not isinstance(order.membership, msg.Membership):
                    raise RemoteProtocolError("an agent passed on the change of a membership instead of the whole")
                if self.membership is not None:
                    self.replaced |= frozenset(self.membership.replaced(order.membership))
                self._order, self.membership = order, order.membership
            case msg.Resume():
                self._resumed = max(self._resumed, order.generation)
            case msg.Complete():
                self._completed = max(self._completed, order.generation)
            case msg.Abandon():
                return Urgency.BREAK
            case msg.Rescue():
                self._rescue = order
            case msg.Hold() if order.generation == self.generation:
                self._hold = self._unsent = msg.Holding((self.worker,), order.generation, self._next_stop)
            case msg.Drain():
                self._drain = order
            case msg.Terminate():
                self.terminated = True
            case _:
                pass
        return Urgency.NONE

    def _stop(self, order: msg.Stop) -> Urgency:
        step, phase = self.steps.step, self.steps.phase
        has_all = phase is Phase.BACKWARD or (phase is Phase.FORWARD and step == self.boundary)
        in_time = has_all and step == order.synced_step
        settles = in_time and not self._failed  # after a failed collective, the backward has ended already
        self._settling, self._synced_step = order.generation if settles else None, order.synced_step
        self._stop_generation = order.generation
        return Urgency.SETTLE if settles else Urgency.BREAK

    def settled(self, generation: int | None = None) -> Urgency:
        """Ends the wait for the backward: it has ended, or its time for the `Stop` of ``generation`` is over."""
        if self._settling is None or generation not in (None, self._settling):
            return Urgency.NONE
        self._settling = None
        return Urgency.BREAK

    def holding(self) -> msg.Holding | None:
        """Returns the answer to a new `Hold`, once. The listener sends it: the other thread may be in a collective."""
        answer, self._unsent = self._unsent, None
        return answer

    # ---- what any thread may call -----------------------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether the training thread must go to a safe point. It is read many times in a step, so it must be cheap."""
        generation = self.generation  # `_stopping` and `_failed` inlined: their calls would take longer than this line
        return (self._stop_generation > generation and self._settling is None) or self._failed_generation == generation

    @property
    def target_generation(self) -> int:
        """The generation in which this rank is, or to which it is on its way."""
        assigned = self.assignment.generation if self.assignment is not None else 0
        return max(assigned, self._stop_generation, self.generation)

    @property
    def owes_safe_point(self) -> bool:
        """Whether a `Stop` waits for its answer: call `holds` before `next_move`."""
        return self._stop_generation > self._reported

    @property
    def _stopping(self) -> bool:
        return self._stop_generation > self.generation

    @property
    def _failed(self) -> bool:
        """Whether a collective has failed since the groups were connected."""
        return self._failed_generation == self.generation

    def is_over(self, generation: int) -> bool:
        """Whether a newer generation has begun."""
        return self._stop_generation > generation

    def collective_failed(self, group: str, error: str) -> msg.CollectiveFailed | None:
        """Records that a collective has failed. Returns the hint for the controller, the first time in a generation."""
        if self.state is WorkerState.COMPLETE:
            return None
        first = not self._failed and not self._stopping
        self._failed_generation = self.generation
        return msg.CollectiveFailed(self.worker, self.generation, group, error) if first else None

    def echoed(self) -> None:
        """Records that the echo has answered a collective."""
        self.used_echo = True

    def lost_value(self) -> None:
        """Records that a collective or an optimizer's ``step()`` has failed where the step can no longer be undone."""
        self.partially_updated = self.in_doubt = True
        self._flaw = "its copy was given up: a failure has cut off what could no longer be undone"

    def found_whole(self) -> None:
        """Records that the state contains no wrong value after all, although `lost_value` was called."""
        if self.in_doubt:
            self.partially_updated = self.in_doubt = False

    def found_partially_updated(self, doubt: str | None, flaw: str) -> None:
        """Records that the state may contain a wrong value, so that this copy is restored from another one.

        Args:
            doubt: see `msg.SafePointReached`.
            flaw: what may be wrong with the copy.
        """
        self.in_doubt, self.doubt, self._flaw = False, doubt, f"its copy was given up: {flaw}"

    # ---- the training thread: what to do next -----------------------------------------------------------------------

    def next_move(self) -> Move:
        """Returns the next move of the training thread. A returned `SendReport` counts as done."""
        if self._sayings:
            return SendReport(self._sayings.pop(0))
        if self._rescue is not None and self.state in WAITS_FOR_ORDERS:
            return SaveAndEnd(self._rescue)
        match self.state:
            case WorkerState.LAUNCHED:
                self.state = WorkerState.JOINING
                return SendReport(msg.WorkerJoined(self.worker, self._pid))
            case WorkerState.JOINING:
                return self._joining()
            case WorkerState.CONNECTING:
                return self._connecting()
            case WorkerState.BUILDING:
                return Build()
            case WorkerState.READY:
                if self.is_over(self.generation):
                    return self._stand(self.generation)
                return Wait() if self._order is None else self._carry_out(self._order)
            case WorkerState.STANDING:
                return self._standing()
            case WorkerState.LOADING:
                return self._loading()
            case WorkerState.RECOVERED:
                if self.is_over(self.generation):
                    return self._stand(self.generation)
                if self._resumed != self.generation and not self._is_draining:
                    return Wait()
                self.state = WorkerState.TRAINING
                return self._next_step()
            case WorkerState.TRAINING:
                return self._stand(self.generation) if self.interrupted else self._next_step()
            case WorkerState.SAVING:
                raise LocalProtocolError(f"rank {self.rank} asks for more before its checkpoint is written")
            case WorkerState.DRAINED:
                if self.is_over(self.generation):
                    return self._stand(self.generation)
                return self._go_on(WorkerState.COMPLETE, End()) if self.terminated else Wait()
            case WorkerState.FINISHED:
                if self.is_over(self.generation):
                    return self._stand(self.generation)
                if self._stands_at_the_end:
                    return self._go_on(WorkerState.SAVING, Save(self._at))
                return self._go_on(WorkerState.COMPLETE, End()) if self._completed == self.generation else Wait()
            case WorkerState.COMPLETE:
                return End()

    @property
    def drains(self) -> bool:
        """Whether this rank has had an order of a drain."""
        return self._hold is not None or self._drain is not None or self.terminated

    @property
    def _is_draining(self) -> bool:
        return self._drain is not None and self._drain.generation == self.generation

    @property
    def _at(self) -> int:
        at = self.steps.parameters_at
        assert at is not None
        return at

    @property
    def _stands_at_the_end(self) -> bool:
        return self._drain is not None and self._is_draining and self._at >= self._drain.step

    def _next_step(self) -> Move:
        """Returns the move before the next step: train, wait for the end of a `Hold`, or save because the job ends."""
        if self._stands_at_the_end:
            return self._go_on(WorkerState.SAVING, Save(self._at))
        is_held = self._hold is not None and self._hold.generation == self.generation and self._at >= self._hold.step
        if is_held and not self._is_draining:
            return Wait()
        self._next_stop = self._at + 1
        return Train()

    def _go_on(self, state: WorkerState, move: Move) -> Move:
        self.state = state
        return move

    def _joining(self) -> Move:
        if self.rank is None:
            return self._go_on(WorkerState.BUILDING, Build())
        assigned = self.assignment.generation if self.assignment is not None else 0
        if self._stop_generation > assigned:
            self.used_echo = True  # the start-up continues with echoed collectives and ends at the first step
            return self._go_on(WorkerState.BUILDING, Build())
        return self._connect(assigned) if assigned else Wait()

    def _connecting(self) -> Move:
        if not self.is_over(self._target):
            return Connect(self._target)
        self._fall_back(self._target)
        return self.next_move()

    def _connect(self, generation: int) -> Move:
        self._target = generation
        return self._go_on(WorkerState.CONNECTING, Connect(generation))

    def _stand(self, after: int) -> Move:
        """Stops training, because generation ``after`` is over, and waits for the decision on each later `Stop`."""
        self._reported = max(self._reported, after)
        self._order = None
        self.state = WorkerState.STANDING
        if self.steps.phase in (Phase.FORWARD, Phase.BACKWARD):
            return Undo()
        return self._standing()

    def _standing(self) -> Move:
        if self._stop_generation > self._reported:
            self._reported = self._stop_generation
            step, phase = self.stopped_in or (self.steps.step, self.steps.phase)
            current = None if self.partially_updated else self.steps.parameters_at
            may_lack_calls = self.steps.step == self.boundary != self._synced_step
            would_repeat = self.steps.phase is Phase.SYNCED and (self.communicates_in_update or may_lack_calls)
            at = (self._stop_generation, step, phase, self.own_reach(), current)
            flaw = msg.text(self._flaw) if self.partially_updated and self._flaw is not None else None
            held = (self._snapshots, would_repeat, self._second_copies, self.doubt, flaw)
            return SendReport(msg.SafePointReached((self.worker,), *at, *held))
        order = self._order
        if order is None or not order.generation == self._stop_generation == self._reported:
            return Wait()
        return self._carry_out(order)

    def _carry_out(self, order: msg.Recover) -> Move:
        if self.is_over(order.generation):
            return self._stand(order.generation)
        if self.steps.phase is Phase.SYNCED:
            if self._action(order) is not Action.ADVANCE:
                return Undo()
            self._advanced = order.generation
            return Update()
        if self.partially_updated and self._advanced == order.generation:
            self._target = order.generation
            self.fell_out("update", "it is not known to be whole, so this rank is not where it was to advance to")
            return self.next_move()
        if self.generation != order.generation:
            return self._connect(order.generation)
        self.state = WorkerState.LOADING
        return self._loading()

    def _loading(self) -> Move:
        order = self._order
        assert order is not None
        if self.is_over(order.generation):
            return self._stand(order.generation)
        action = self._action(order)
        if action in (Action.RESTORE, Action.REWIND):
            self.partially_updated, self.doubt, self._flaw = True, None, "it had not yet received the whole state"
        return Load(order, action)

    def _action(self, order: msg.Recover) -> Action:
        if any(self.rank in transfer.receivers for transfer in (*order.transfers, *order.from_buddies)):
            return Action.RESTORE
        current = None if self.partially_updated else self.steps.parameters_at
        reached = frozenset(self.own_reach())
        action = resume.action(order.resume_step, reached, current, frozenset(self._snapshots))
        if action is Action.RESTORE:
            raise RemoteProtocolError(
                f"generation {order.generation}: rank {self.rank} is to resume at step {order.resume_step}, can be at "
                f"{sorted(reached)}, and no rank is to send it anything"
            )
        return action

    def own_reach(self) -> tuple[int, ...]:
        """Returns the reach of this rank's copy, ascending."""
        if self.partially_updated:
            return ()
        return tuple(sorted(resume.reach(self.steps.step, self.steps.phase)))

    # ---- the training thread: how it went ---------------------------------------------------------------------------

    def connected(self) -> None:
        """Records that all groups are connected in the generation of the `Connect` move."""
        generation = self._target
        self.generation = generation
        self.used_echo = False
        self.stopped_in = None
        self.replaced = frozenset()
        if self.is_over(generation):
            self._fall_back(generation)
            return
        self._sayings.append(msg.GroupsReset((self.worker,), generation))
        self.state = WorkerState.LOADING if self._started else WorkerState.BUILDING

    def fell_out(self, where: str, error: str) -> None:
        """Records that a group could not be connected or a transfer failed. Reports it unless a `Stop` has come."""
        if not self.is_over(self._target):
            self._sayings.append(msg.CollectiveFailed(self.worker, self._target, where, error))
        self._fall_back(self._target)

    def refused(self, error: str) -> None:
        """Records that this rank's state differs from what it has loaded; reports it even after a further stop.

        It may be found as the state is loaded, or in a step that is undone then.
        """
        self._sayings.append(msg.StateRefused(self.worker, self._target, error, False))
        self.partially_updated, self.doubt, self._flaw = True, None, error
        if self.state is WorkerState.TRAINING:
            self.breaks_off()
        self._fall_back(self._target)

    def stands_apart(self, error: str) -> None:
        """Records that this rank differs from its replicas, and did before the failure. It trains on."""
        self._sayings.append(msg.StateRefused(self.worker, self.generation, error, True))

    def breaks_off(self) -> None:
        """Records that all ranks undo this step, because one of them refuses what it has loaded."""
        self._failed_generation = self.generation

    def _fall_back(self, generation: int) -> None:
        if self._started:
            self._reported = max(self._reported, generation)
            self._order = None
            self.state = WorkerState.STANDING
        else:
            self.used_echo = True
            self.state = WorkerState.BUILDING

    def await_rank(self) -> msg.RankAwaited | None:
        """Returns the report that the script has reached a line that needs its rank; None if the worker has a rank."""
        return msg.RankAwaited(self.worker) if self.rank is None else None

    def built(
        self,
        shard: str,
        snapshots: tuple[int, ...],
        checkpointing: bool,
        timeout_s: float,
        start: int = 0,
        *,
        resumes: bool = False,
    ) -> None:
        """Records that the script has protected all state and is at its first step, number ``start``.

        The other arguments are fields of `msg.WorkerReady`.
        """
        if self.generation > 0 and not self.used_echo:
            self.steps.restored(start)
        self._started = True
        self._snapshots = snapshots
        reach = self.own_reach()
        ready = msg.WorkerReady(
            self.worker, self.generation, reach, snapshots, checkpointing, resumes, shard, timeout_s
        )
        self._sayings.append(ready)
        self._target = self.generation
        self.state = WorkerState.READY

    def loaded(self, received_bytes: int, *, from_checkpoint: bool = False) -> None:
        """Records that this rank's shard is at the resume step; see `msg.StateRecovered`."""
        order = self._order
        assert order is not None
        if self.partially_updated:
            self.partially_updated = False
            self.steps.restored(order.resume_step)
        self._next_stop = order.resume_step
        self._sayings.append(msg.StateRecovered((self.worker,), order.generation, received_bytes, from_checkpoint))
        self.state = WorkerState.RECOVERED

    def undone(self) -> None:
        """Records that the interrupted step is undone."""
        self.stopped_in = (self.steps.step, self.steps.phase)
        self.steps.advance(StepEvent.STEP_UNDONE)

    def holds(self, snapshots: tuple[int, ...], second_copies: msg.SnapshotsByRank) -> None:
        """Records, at a safe point, the steps that this rank can load, and the second copies that it keeps."""
        self._snapshots, self._second_copies = snapshots, second_copies

    def saved(self, is_saved: bool) -> None:
        """Records that this rank has done its part at the last step of a drain. ``is_saved``: it wrote a checkpoint."""
        self._sayings.append(msg.Drained((self.worker,), self.generation, is_saved))
        self.state = WorkerState.DRAINED

    def finished(self, digest: str | None) -> None:
        """Records that the last step is complete. ``digest`` is that of all protected state, if requested."""
        step = self.steps.parameters_at
        assert step is not None
        self._sayings.append(msg.StepsFinished((self.worker,), self.generation, step, digest))
        self.state = WorkerState.FINISHED
