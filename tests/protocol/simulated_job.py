"""A job in one process, for tests of the controller's machine: its nodes, and workers that play by the rules.

The workers wait for each other where real ones do (in the rendezvous of a generation, for complete gradients, at the
gradient barrier, for a source of state), report what is true, and can be killed, hung or kept from answering; a node
can be lost with all that runs there. `Oracle` has its own idea of what must hold, and fails a test as soon as the
machine's orders break it.

`SimulatedJob.moves` lists everything that could happen next; `settle` lets all happen but training itself, a random
walk picks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.protocol.simulated_nodes import SimulatedNodes
from tests.protocol.simulated_oracle import Oracle
from tests.protocol.simulated_worker import AWAITS_ORDERS, ORDER_IN_STEP, Position, SimulatedWorker, WorkerState

from keepstep.protocol.deadlines import Deadlines
from keepstep.protocol.messages import (
    AnyMessage,
    Cause,
    CollectiveFailed,
    EndJob,
    GroupsReset,
    NodeJoined,
    Recover,
    Resume,
    SafePointReached,
    StateRecovered,
    StateRefused,
    StateRescued,
    StepObserved,
    StepsFinished,
    Tag,
    WorkerDone,
    WorkerFailed,
    WorkerFenced,
    WorkerJoined,
    WorkerLost,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Effect, RecoveryMachine, RecoverySettings, Stage
from keepstep.protocol.resume import Action

NODE = "node-a"
EVENT_S = 0.001
"""What one event takes on the job's clock; deadlines are orders of magnitude longer."""

Move = tuple[str, Callable[[], None]]


class SimulatedJob(SimulatedNodes):
    """Machine, nodes and workers, and the messages that are under way between them."""

    def __init__(
        self,
        world_size: int = 3,
        num_spares: int = 1,
        num_steps: int = 20,
        checkpoint_every: int | None = None,
        resumes: bool = False,
        shards: Callable[[int], str] = lambda rank: "0",
        nodes: dict[str, int] | None = None,
        timeout_s: float = 0.0,
        **settings: object,
    ) -> None:
        """``nodes``: how many slots each has; "name/domain" where its domain matters. One that just fits by default.
        ``settings``: fields of `RecoverySettings` and `Deadlines`."""
        super().__init__()
        names = {field.name for field in dataclasses.fields(Deadlines)}
        deadlines = Deadlines(**{name: settings.pop(name) for name in names & settings.keys()})
        self.machine = RecoveryMachine(RecoverySettings(world_size, num_spares, deadlines=deadlines, **settings))
        self.oracle = Oracle(self.machine, shards, checkpoint_every is not None)
        self.most_per_node = self.machine.settings.most_per_node
        self.num_steps = num_steps
        self.checkpoint_every = checkpoint_every
        self.resumes = resumes
        self.checkpoints: set[int] = set()
        self.shards, self.timeout_s = shards, timeout_s
        self.now_s = 1000.0
        self.effects: list[Effect] = []
        self.ended: EndJob | None = None
        self.progress: dict[tuple[int, int], tuple[int, int]] = {}
        """(generation, rank) -> how far that rank ever came: what it gave to the others is with them."""
        self.met: set[int] = set()
        """Generations in which all ranks came to the rendezvous."""
        self.num_deadlines = 0
        """How often a deadline had to come before anything could go on."""
        self._withheld: set[tuple[object, type]] = set()
        for name, slots in (nodes or {NODE: world_size + num_spares}).items():
            self.offer(name.partition("/")[0], slots, name.partition("/")[2])

    # ---- what tests use ---------------------------------------------------------------------------------------------

    def holder(self, rank: int) -> SimulatedWorker:
        """The process that holds a rank, as the machine sees it."""
        holders = {worker.rank: worker.worker for worker in self.machine.roster.holders()}
        assert rank in holders, f"no process holds rank {rank}"
        return self.workers[holders[rank]]

    @property
    def where(self) -> tuple[Stage, int]:
        """Stage and generation of the job."""
        return self.machine.stage, self.machine.generation

    def join(self) -> SimulatedJob:
        """All offers of nodes arrive, and rank 0 calls `keepstep.init()`; nothing else happens."""
        for source in [source for source in self.reports if isinstance(source, tuple) and source[0] == "agent"]:
            while self.reports[source]:
                self.say(self.reports[source].popleft())
        first = self.workers.get(0)
        if first is not None and first.state is WorkerState.LAUNCHING:
            self._join(first)
            while self.reports[0]:
                self.say(self.reports[0].popleft())
        return self

    def withhold(self, who: SimulatedWorker | str, *kinds: type) -> None:
        """The worker, or the agent of the node, stops before it sends any of these, until `release`."""
        self._withheld |= {(who.number if isinstance(who, SimulatedWorker) else who, kind) for kind in kinds}

    def release(self) -> None:
        """Nothing is held back any more."""
        self._withheld.clear()

    def settle(self) -> SimulatedJob:
        """Lets everything happen that can, except training itself."""
        while move := next(self.moves(training=False), None):
            move[1]()
        return self

    def bring(self, **places: Position) -> SimulatedJob:
        """Trains each rank up to a place, `rank0=(3, Phase.SYNCED)`; fails where the ranks' waiting forbids it."""
        self.settle()
        goals = {int(name.removeprefix("rank")): place for name, place in places.items()}
        while behind := [rank for rank, place in goals.items() if self._before(rank, place)]:
            moves = [move for rank in behind if (move := self._training_move(self.holder(rank)))]
            assert moves, f"ranks {behind} cannot come to {goals} without the others"
            for move in moves:
                move()
            self.settle()
        return self

    def bring_all(self, step: int, phase: Phase) -> SimulatedJob:
        """Trains all ranks up to the same place."""
        return self.bring(**{f"rank{rank}": (step, phase) for rank in range(self.machine.settings.world_size)})

    def finish(self) -> SimulatedJob:
        """Trains to the end, whatever deadline has to come for it."""
        while not self.ended:
            if move := next(self.moves(training=True), None):
                move[1]()
            else:
                self.deadline()
        return self

    def finish_well(self) -> None:
        """Trains to the last step: without waiting for any deadline, and all ranks end with the same."""
        self.finish()
        assert self.ended is not None
        assert self.ended.exit_code == 0, self.ended.reason
        assert self.num_deadlines == 0, f"a deadline had to come, now in generation {self.machine.generation}"
        ranks = range(self.machine.settings.world_size)
        assert self.machine.digests == dict.fromkeys(ranks, f"weights at step {self.num_steps}")

    def deadline(self) -> None:
        """Time goes by until the machine's next deadline."""
        due = self.machine.next_deadline()
        assert due is not None, f"the machine is {self.machine.stage}, nothing can happen and it waits for ever"
        self.num_deadlines += 1
        self.now_s = max(self.now_s, due)
        self._perform(self.machine.tick(self.now_s))

    def say(self, message: AnyMessage, node: str | None = None) -> list[Effect]:
        """Gives the machine one report, past all queues, and returns its effects; they are carried out."""
        self.now_s += EVENT_S
        number = next(iter(getattr(message, "workers", ())), getattr(message, "worker", None))
        sender = node or getattr(message, "node", None) or self._placed[number]
        effects = self.machine.receive(sender, message, self.now_s)
        self._perform(effects)
        return effects

    def restart_controller(self) -> None:
        """The controller is killed and started again with its journal."""
        self.now_s += EVENT_S
        self._perform(self.machine.restarted(self.now_s))

    def orders(self, kind: type) -> list[AnyMessage]:
        """All orders of one type so far."""
        return [effect.order for effect in self.effects if isinstance(effect.order, kind)]

    # ---- faults -----------------------------------------------------------------------------------------------------

    def kill(self, worker: SimulatedWorker) -> None:
        """Its process is killed from outside."""
        self._lose(worker, Cause.SIGNAL, "killed by SIGKILL")

    def die(self, worker: SimulatedWorker) -> None:
        """Its agent sees that it is dead, and not yet how it ended."""
        self._lose(worker, Cause.DIED, "its process died")

    def throw(self, worker: SimulatedWorker, error: str = "ValueError: bad batch", *, fatal: bool = False) -> None:
        """An uncaught exception ends it."""
        self._queue(worker.number, WorkerFailed(worker.number, error, "Traceback ...", fatal))
        self._lose(worker, Cause.EXIT, "exit code 1")

    def refuse(self, worker: SimulatedWorker, error: str) -> None:
        """It has loaded the state, and what it then holds is not what was loaded."""
        worker.failed_in = worker.generation
        self._queue(worker.number, StateRefused(worker.number, worker.generation, error, False))
        worker.stand()

    def quit(self, worker: SimulatedWorker) -> None:
        """Its script ends with exit code 0 outside of a step."""
        self._exit(worker)
        self._queue(worker.number, WorkerDone(worker.number, worker.parameters_at))

    def hang(self, worker: SimulatedWorker, *, seen: bool = True) -> None:
        """It stops answering; its agent sees that, or does not."""
        worker.hung = True
        if seen:
            lost = WorkerLost(worker.number, Cause.HANG, "no progress", False, self._tag(worker), self.now_s)
            self._queue(worker.number, lost)

    def expire(self, node: NodeJoined) -> None:
        """The lease of a lost node is over."""
        self.now_s += EVENT_S
        self.dark.remove(node)
        self._perform(self.machine.node_lost(node.node, f"node {node.node} lost: not heard of", self.now_s, self.now_s))

    def _fence(self, worker: SimulatedWorker) -> None:
        self._exit(worker)
        self._queue(worker.number, WorkerFenced(worker.number))

    def _lose(self, worker: SimulatedWorker, cause: Cause, detail: str) -> None:
        self._exit(worker)
        self._queue(worker.number, WorkerLost(worker.number, cause, detail, True, self._tag(worker), self.now_s))

    def _tag(self, worker: SimulatedWorker) -> Tag:
        return Tag(worker.generation, worker.step, worker.phase)

    # ---- everything that can happen next ----------------------------------------------------------------------------

    def moves(self, *, training: bool, failures: bool = False) -> Iterator[Move]:
        """All moves that are open now.

        Args:
            training: steps are computed, too.
            failures: collectives end in errors where a peer is gone; a worker may notice before its agent does.
        """
        if self.ended:
            return
        for source, queue in list(self.reports.items()):
            who = source if isinstance(source, int) else self._sender(source)
            if queue and (who, type(queue[0])) not in self._withheld:
                yield f"deliver {type(queue[0]).__name__} of {source}", lambda source=source: self._deliver(source)
        for node in list(self.dark):
            yield f"the lease of {node.node} expires", lambda node=node: self.expire(node)
        for worker in list(self.workers.values()):
            if worker.orders and not worker.hung:
                yield f"{worker.number} reads", lambda worker=worker: worker.read(worker.orders.popleft())
            if worker.dying and (move := self._sends(worker, WorkerFenced, self._fence)):
                yield f"the fence reaches worker {worker.number}", move
            if move := self._next(worker, training):
                yield f"worker {worker.number} goes on from {worker.state.name}", move
            if failures and (move := self._collective_failure(worker)):
                yield f"a collective of worker {worker.number} fails", move

    def _deliver(self, source: object) -> None:
        self.say(self.reports[source].popleft(), self._sender(source))

    def _next(self, worker: SimulatedWorker, training: bool) -> Callable[[], None] | None:
        """The one thing that this worker's training thread can do next, or None while it has to wait."""
        if worker.hung:
            return None
        if worker.rescue and worker.state in AWAITS_ORDERS:
            return self._sends(worker, StateRescued, self._rescue)
        stopping = worker.told > worker.generation
        match worker.state:
            case WorkerState.LAUNCHING:
                return self._sends(worker, WorkerJoined, self._join)
            case WorkerState.JOINING if worker.assignment is not None or worker.told > 0:
                return worker.begin
            case WorkerState.CONNECTING:
                return self._connecting(worker)
            case WorkerState.BUILDING:
                return self._sends(worker, WorkerReady, self._ready)
            case WorkerState.STANDING if worker.told > worker.reported:
                return self._sends(worker, SafePointReached, self._report_safe_point)
            case WorkerState.STANDING if worker.order and worker.order.generation == worker.told == worker.reported:
                return lambda: self._carry_out(worker, worker.order)
            case WorkerState.READY | WorkerState.RESTORING | WorkerState.RESTORED | WorkerState.FINISHED if stopping:
                return worker.stand
            case WorkerState.READY if worker.order is not None:
                return lambda: self._carry_out(worker, worker.order)
            case WorkerState.RESTORING if self._source_is_there(worker):
                return self._sends(worker, StateRecovered, self._recover)
            case WorkerState.RESTORED if worker.resumed == worker.generation:
                return lambda: setattr(worker, "state", WorkerState.TRAINING)
            case WorkerState.TRAINING:
                if stopping or worker.failed_in == worker.generation:
                    return self._step_on(worker) if worker.phase is Phase.OPTIMIZER else worker.stand
                return self._training_move(worker) if training else None
            case WorkerState.FINISHED if worker.completed == worker.generation:
                return lambda: setattr(worker, "state", WorkerState.COMPLETE)
            case WorkerState.COMPLETE:
                return self._sends(worker, WorkerDone, self._end)
        return None

    def _sends(
        self, worker: SimulatedWorker, kind: type, move: Callable[[SimulatedWorker], None]
    ) -> Callable[[], None] | None:
        return None if (worker.number, kind) in self._withheld else lambda: move(worker)

    def _running(self) -> list[SimulatedWorker]:
        """The processes that may run a line of their script: SIGKILL is pending in one that does not die of it."""
        stuck = {number for number, kind in self._withheld if kind is WorkerFenced}
        return [each for each in self.workers.values() if not (each.dying and each.number in stuck)]

    def _collective_failure(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        """A hint that a peer is gone, open to a worker that could be waiting for one that is."""
        ranks = {other.rank for other in self.workers.values()}
        if worker.hung or len(ranks - {None}) == self.machine.settings.world_size:
            return None
        within = worker.target if worker.state is WorkerState.CONNECTING else worker.generation
        busy = worker.state in (WorkerState.CONNECTING, WorkerState.RESTORING, WorkerState.TRAINING)
        if not busy or worker.told > within or worker.failed_in == within:
            return None
        return lambda: self._collective_failed(worker, within)

    def _collective_failed(self, worker: SimulatedWorker, within: int) -> None:
        worker.failed_in = within
        self._queue(worker.number, CollectiveFailed(worker.number, within, "world", "connection closed by peer"))
        if worker.state is WorkerState.CONNECTING:
            self._superseded(worker)
        elif worker.state is WorkerState.RESTORING:
            worker.stand()

    # ---- a worker's start -------------------------------------------------------------------------------------------

    def _join(self, worker: SimulatedWorker) -> None:
        self._queue(worker.number, WorkerJoined(worker.number, 4000 + worker.number))
        worker.state = WorkerState.BUILDING if worker.rank is None else WorkerState.JOINING

    def _connecting(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        if worker.told > worker.target:
            return lambda: self._superseded(worker)
        there = {
            other.rank
            for other in self.workers.values()
            if other.state is WorkerState.CONNECTING and other.target == worker.target and not other.hung
        }
        if worker.target not in self.met and len(there) < self.machine.settings.world_size:
            return None
        return self._sends(worker, GroupsReset, self._connected)

    def _superseded(self, worker: SimulatedWorker) -> None:
        """A rendezvous that came to nothing: a start-up goes on in echo, a recovery waits for the next generation."""
        if worker.order is None:
            worker.state = WorkerState.BUILDING
        else:
            worker.stand()
            worker.reported = worker.target

    def _connected(self, worker: SimulatedWorker) -> None:
        self.met.add(worker.target)
        worker.generation, worker.stopped_in = worker.target, None
        self._queue(worker.number, GroupsReset((worker.number,), worker.generation))
        worker.state = WorkerState.BUILDING if worker.order is None else WorkerState.RESTORING
        worker.partially_updated = worker.partially_updated or (
            worker.order is not None and worker.action is Action.RESTORE
        )

    def _ready(self, worker: SimulatedWorker) -> None:
        if worker.generation > 0 and worker.told <= worker.generation:
            worker.step, worker.phase = -1, Phase.UPDATED
        snapshots, writes = tuple(sorted(self.checkpoints)), self.checkpoint_every is not None
        worker.said = (worker.reach(), worker.parameters_at, snapshots)
        said = (
            worker.generation,
            worker.reach(),
            snapshots,
            writes,
            self.resumes,
            self.shards(worker.rank or 0),
            self.timeout_s,
        )
        self._queue(worker.number, WorkerReady(worker.number, *said))
        worker.state = WorkerState.READY

    # ---- a worker's recovery ----------------------------------------------------------------------------------------

    def _report_safe_point(self, worker: SimulatedWorker) -> None:
        worker.reported = worker.told
        step, phase = worker.stopped_in or (worker.step, worker.phase)
        snapshots = tuple(sorted(self.checkpoints))
        reach, at, _ = worker.said = (worker.reach(), worker.parameters_at, snapshots)
        self._queue(
            worker.number,
            SafePointReached((worker.number,), worker.told, step, phase, reach, at, snapshots, False, (), None, None),
        )

    def _carry_out(self, worker: SimulatedWorker, order: Recover) -> None:
        if worker.phase is Phase.SYNCED and worker.action is Action.ADVANCE:
            worker.phase = Phase.UPDATED
            self._update(worker)
        elif worker.phase is Phase.SYNCED:
            worker.undo()
        if worker.told > order.generation:
            worker.stand()
            worker.reported = order.generation
        elif worker.generation != order.generation:
            worker.connect(order.generation)
        else:
            worker.state = WorkerState.RESTORING
            worker.partially_updated = worker.partially_updated or worker.action is Action.RESTORE

    def _source_is_there(self, worker: SimulatedWorker) -> bool:
        assert worker.order is not None
        transfer = worker.receives
        if transfer is None:
            return True
        sources = [other for other in self.workers.values() if other.rank in transfer.sources and not other.hung]
        return bool(sources) and all(
            source.generation == worker.generation and source.parameters_at == worker.order.resume_step
            for source in sources
        )

    def _recover(self, worker: SimulatedWorker) -> None:
        order, action, received = worker.order, worker.action, 0
        assert order is not None
        self.oracle.check_action(worker)
        if action is Action.REWIND:
            assert order.resume_step in self.checkpoints, f"{order} names a checkpoint that is not there"
        if action in (Action.REWIND, Action.RESTORE):
            worker.step, worker.phase, worker.partially_updated = order.resume_step - 1, Phase.UPDATED, False
            received = 8 if action is Action.RESTORE else 0
        assert worker.parameters_at == order.resume_step, f"{order} left its parameters at {worker.parameters_at}"
        from_checkpoint = action is Action.REWIND
        self._queue(worker.number, StateRecovered((worker.number,), worker.generation, received, from_checkpoint))
        worker.state = WorkerState.RESTORED

    # ---- a worker's steps -------------------------------------------------------------------------------------------

    def _before(self, rank: int, place: Position) -> bool:
        return self.holder(rank).place() < (place[0], ORDER_IN_STEP.index(place[1]))

    def _training_move(self, worker: SimulatedWorker) -> Callable[[], None] | None:
        """The next phase, unless it has to wait: for gradients of all, or for all in the barrier."""
        if worker.state is not WorkerState.TRAINING or worker.hung:
            return None
        if worker.phase is Phase.UPDATED and worker.step + 1 == self.num_steps:
            return self._sends(worker, StepsFinished, self._finish)
        needed = {Phase.BACKWARD: Phase.BACKWARD, Phase.SYNCED: Phase.SYNCED}.get(worker.phase)
        if needed is not None:
            place = (worker.step, ORDER_IN_STEP.index(needed))
            ranks = range(self.machine.settings.world_size)
            if any(self.progress.get((worker.generation, rank), (-1, -1)) < place for rank in ranks):
                return None
        return self._step_on(worker)

    def _step_on(self, worker: SimulatedWorker) -> Callable[[], None]:
        def move() -> None:
            if worker.phase is Phase.UPDATED:
                worker.step, worker.phase = worker.step + 1, Phase.FORWARD
            else:
                worker.phase = ORDER_IN_STEP[ORDER_IN_STEP.index(worker.phase) + 1]
            assert worker.rank is not None
            self.progress[worker.generation, worker.rank] = worker.place()
            if worker.phase is Phase.UPDATED:
                self._update(worker)

        return move

    def _update(self, worker: SimulatedWorker) -> None:
        """A step is complete: the agent sees it when all ranks there have got so far, rank 0 may write a checkpoint."""
        if worker.state is WorkerState.TRAINING and worker.observed_in < worker.generation:
            worker.observed_in = worker.generation
            ranks = self.nodes[worker.node].ranks
            there = [self.workers[number] for number, rank in ranks.items() if rank is not None]
            if all(other.observed_in == worker.generation for other in there):
                seen = StepObserved(worker.node, worker.generation, worker.step, self.now_s, 0.1, ())
                self._queue(("page", worker.node), seen)
        if self.checkpoint_every and worker.rank == 0 and (worker.step + 1) % self.checkpoint_every == 0:
            self.checkpoints.add(worker.step + 1)

    def _finish(self, worker: SimulatedWorker) -> None:
        digest = f"weights at step {worker.parameters_at}"
        self._queue(worker.number, StepsFinished((worker.number,), worker.generation, worker.step + 1, digest))
        worker.state = WorkerState.FINISHED

    def _end(self, worker: SimulatedWorker) -> None:
        if worker.abandoned:
            self._lose(worker, Cause.EXIT, "exit code 1")
        else:
            self._exit(worker)
            self._queue(worker.number, WorkerDone(worker.number, worker.parameters_at))

    def _rescue(self, worker: SimulatedWorker) -> None:
        at = worker.parameters_at
        path, error = (None, "its copy is not whole") if at is None else (f"rescued-{worker.rank}-at-{at}.pt", None)
        self._queue(worker.number, StateRescued(worker.number, path, error))
        self._lose(worker, Cause.EXIT, "exit code 76")

    # ---- the agents carry out orders, and the oracle checks them ----------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        self.oracle.check_stage(self.now_s)
        self.oracle.check_books()
        for effect in effects:
            self.effects.append(effect)
            assert len(effect.reason.split()) >= 2, f"{effect.order} has no reason"
            if isinstance(effect.order, EndJob):
                assert self.ended is None, "the job ends twice"
                self.ended = effect.order
            elif isinstance(effect.order, Recover):
                self.oracle.check_decision(effect.order, self._running())
            elif isinstance(effect.order, Resume):
                self.oracle.check_resume(effect.order, self.workers)
            self._obey(effect)


def three_nodes(**options: object) -> SimulatedJob:
    """Ranks 0 and 1 on node a; ranks 2 and 3 and spare 5 on b; spares 4 and 6 on c."""
    nodes = {"a/rack-1": 2, "b/rack-1": 3, "c/rack-2": 2}
    return SimulatedJob(world_size=4, num_spares=3, ranks_per_node=2, nodes=nodes, **options)
