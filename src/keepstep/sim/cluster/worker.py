"""One simulated rank of the job: the real `WorkerMachine`, and a model of training around it.

Its parameters are the history of the updates that were applied to them. A rank's results depend on nothing else: an
update with incomplete gradients, or gradients of another step, leaves a permanent mark.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, assert_never

from keepstep.errors import InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol import moves
from keepstep.protocol.comparison import Said, follows_recovery, judge
from keepstep.protocol.messages import Cause
from keepstep.protocol.node.effects import Spawn
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS
from keepstep.protocol.resume import Action
from keepstep.protocol.worker import Urgency
from keepstep.protocol.worker import WorkerState as State
from keepstep.sim.cluster.collectives import Key
from keepstep.sim.cluster.node import SimulatedNode
from keepstep.sim.cluster.process import SimulatedProcess, held_while_stopped
from keepstep.sim.cluster.scripts.activity import Activity
from keepstep.sim.cluster.values import INCOMPLETE, History, LostValue, Rows

if TYPE_CHECKING:
    from keepstep.sim.world import World

SETTLE_S = 0.25
MAX_MOVES = 50
"""Moves without any time between them. More are an endless loop."""
CONNECT_DEADLINE_S = 12.0


class SimulatedWorker(SimulatedProcess):
    """A process with a script: alive until it exits, is killed, or its node is lost."""

    node: SimulatedNode

    def __init__(self, world: World, node: SimulatedNode, process: int, wanted: Spawn) -> None:
        super().__init__(world, node, process, wanted)
        self._connecting = 0
        """The generation in which it connects, or has last connected."""
        self._loading_step = self._awaits_copy = 0
        """Number of the activity in which the training thread waits for a snapshot, before the gradient barrier."""
        self._entered = -1, ""
        """The step and the name of the last collective of all ranks."""
        self._reads_checkpoint = False
        self._to_do: list[msg.Transfer] = []
        """The remaining transfers of the recovery in which it takes part."""
        self._gradients: int | None = None
        self._has_read = False
        """Whether it has had its first batch, which takes long in some jobs."""
        """The step whose complete gradients it holds."""
        self._resumed_at = 0
        self._has_loaded = self._is_restored = False
        """Whether this process has got its state for the resume step from elsewhere; and whether it once has, and was
        not compared since with an update behind it."""
        self._is_wrong_later = self._is_unnoticed = False
        """Whether its next update will differ from that of its replicas, by what is in no state; and whether its state
        does so already, before a comparison."""
        self._activity = 0
        """Number of the training thread's activity. An event of an earlier activity is stale."""
        self.is_idle = True

    # ---- the listener -----------------------------------------------------------------------------------------------

    @held_while_stopped
    def order(self, order: msg.WorkerOrder) -> None:
        """Receives an order of the controller."""
        if isinstance(order, msg.OnceAnswered):
            return self.world.once.answered(self, order)
        if isinstance(order, msg.InheritSnapshots) and (memory := self.node.memory_of(int(order.path))) is not None:
            self.snapshots.inherit(memory, order.rank, order.steps)
        if isinstance(order, msg.Assign):
            self.local_rank, self.local_world_size = order.local_rank, order.local_world_size
            self.device = self.device if order.device is None else order.device
        self._heed(self.machine.receive(order), getattr(order, "generation", 0))
        if self.is_in_doubt and self.machine.doubt is None:
            self.is_in_doubt = False
            self.world.oracle.doubt_lifted(self)
        if (holding := self.machine.holding()) is not None:
            self._say(holding)
        if self.is_idle and not self.is_stuck:
            self.is_idle = False
            self._progress += 1
            self.go()

    def lose_connection(self) -> None:
        """Loses a connection to a peer, without a fault of any process."""
        if self.in_collective is not None:
            self.peer_reset(self.in_collective)

    def lose_group(self) -> None:
        """Reports the failure of a group that the script itself has made. No step waits in it."""
        if self.cohort is not None and (report := self.machine.collective_failed("0-1.7", "connection reset by peer")):
            self._say(report)

    def _heed(self, urgency: Urgency, generation: int) -> None:
        if urgency is Urgency.BREAK:
            self._leave_groups()
            self._interrupt()
        elif urgency is Urgency.SETTLE:
            self._after(SETTLE_S, "settle_timed_out", generation)

    @held_while_stopped
    def settle_timed_out(self, generation: int) -> None:
        """Ends the time that the backward has to complete, if the lost rank was synced in this step."""
        self._heed(self.machine.settled(generation), generation)

    def _interrupt(self) -> None:
        """Interrupts the training thread, at once or at its next stop point."""
        if self.in_collective is not None:
            self.in_collective = None
            self._begin(self._durations.local_s, Activity.CUT_OFF)
        elif self.machine.state in (State.CONNECTING, State.LOADING) and not self.is_idle:
            self._begin(self._durations.local_s, Activity.FALL_OUT, "the group was taken down")
        elif self.machine.steps.phase in (Phase.FORWARD, Phase.BACKWARD) and self.machine.state is State.TRAINING:
            self._begin(self._durations.stop_s, Activity.REACH_STOP_POINT)

    # ---- the training thread ----------------------------------------------------------------------------------------

    def go(self) -> None:
        """Performs the training thread's moves, until one takes time or there is none."""
        machine = self.machine
        for _ in range(MAX_MOVES):
            if not self.is_alive:
                return
            self._show()
            if machine.state in (State.TRAINING, State.FINISHED, State.READY, State.RECOVERED, State.STANDING):
                machine.holds(self.world.loadable_by(self), self.second_copies())
            match move := machine.next_move():
                case moves.SendReport():
                    self._say(move.report)
                case moves.Wait():
                    self._is_waiting = self.is_idle = True
                    return
                case moves.Undo():
                    self.local.undo()
                    machine.undone()
                case moves.Train():
                    return self._train()
                case moves.Build():
                    return self._begin(self.world.draw(self._durations.build_s), Activity.BUILD)
                case moves.Connect():
                    return self._connect(move.generation)
                case moves.Update():
                    return self._update()
                case moves.Load():
                    return self._load(move)
                case moves.Save():
                    if self._is_unnoticed:  # a job that ends before it is compared saves what it has
                        self.parameters = tuple(range(move.step))
                    self.world.oracle.drains_at(self, move.step)
                    return self._begin(self.world.draw(self._durations.optimizer_s), Activity.SAVE)
                case moves.End():
                    return self._begin(self.world.draw(self._durations.optimizer_s), Activity.END)
                case moves.SaveAndEnd():
                    return self._save_and_end(move)
        raise InternalError(f"{self} goes round in circles: {machine.state}, {machine.steps}")

    def is_at(self, activity: int) -> bool:
        """Returns whether the training thread is still in the activity with this number."""
        return self.is_alive and activity == self._activity

    @held_while_stopped
    def perform(self, number: int, activity: Activity, why: str) -> None:
        """Ends the time of an activity, and performs it. ``why``: the reason with which it drops out of a recovery."""
        if number == self._activity and not self.is_stuck:
            self._perform(activity, why)
            self._progress += 1

    def _perform(self, activity: Activity, why: str) -> None:
        match activity:
            case Activity.BUILD:
                self._build()
            case Activity.WAIT_FOR_RANK:
                self._wait_for_rank()
            case Activity.BUILD_IN_ECHO:
                self._build_in_echo()
            case Activity.FALL_OUT:
                self._fall_out(why)
            case Activity.LOADED:
                self._loaded(0)
            case Activity.FORWARD | Activity.BACKWARD:
                self._work()
            case Activity.REACH_STOP_POINT:
                self.go()
            case Activity.CUT_OFF:
                self._cut_off()
            case Activity.REDUCE:
                self._reduce()
            case Activity.COMPLETE:
                self._complete()
            case Activity.SAVE:
                self._save()
            case Activity.END:
                self.die(Cause.EXIT, "")
            case _:
                assert_never(activity)

    def _begin(self, duration_s: float, activity: Activity, why: str = "") -> None:
        """Makes the training thread busy for a time, after which it performs ``activity``."""
        self.is_idle = False
        self._activity += 1
        self._progress += 1
        self._after(duration_s * self.slowness, "perform", self._activity, activity, why)

    # ---- start-up ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        machine, world = self.machine, self.world
        world.once.ask(self)
        if machine.rank is None and world.layout.needs_rank:
            report = machine.await_rank()
            assert report is not None
            self._say(report)
            self._is_waiting = True
            self._begin(self._durations.tick_s, Activity.WAIT_FOR_RANK)
        elif machine.generation > 0 and not machine.used_echo and not machine.interrupted:
            self.local.start(machine.rank)
            world.oracle.start_up.begins(self)
            self._enter(-1, "build")
        else:
            machine.echoed()
            self._built()

    def _wait_for_rank(self) -> None:
        if self.machine.rank is None:
            self._begin(self._durations.tick_s, Activity.WAIT_FOR_RANK)
            self._progress -= 1
        else:
            self._is_waiting = False
            self._begin(
                self.world.draw(self._durations.build_s) if self.world.layout.parks_spares else 0.0,
                Activity.BUILD_IN_ECHO,
            )

    def _build_in_echo(self) -> None:
        self.machine.echoed()
        self._built()

    def _built(self) -> None:
        if self.world.start_up.begin(self):
            self._is_waiting = True
        else:
            self.has_exchanged()

    def has_exchanged(self) -> None:
        """Handles the end of the start-up exchange: the script is at its first step."""
        machine = self.machine
        self._progress += 1
        if machine.generation > 0 and not machine.used_echo:
            self.parameters, self.shard = (), self.world.shard_of(machine.rank)
        writes = self.world.layout.checkpoint_every is not None
        rank = machine.rank if machine.rank is not None else 0
        machine.built(self.world.shard_of(rank), self.world.loadable_by(self), writes, 0.0)
        self.go()

    # ---- a recovery -------------------------------------------------------------------------------------------------

    def _connect(self, generation: int) -> None:
        assert self.machine.rank is not None
        self._is_waiting = True
        self._connecting = generation
        self._begin(CONNECT_DEADLINE_S, Activity.FALL_OUT, "another rank did not come")
        claims = self.groups.claims(self.machine.replaced)
        self.world.rendezvous.come(generation, self.machine.rank, self.process, claims)

    @held_while_stopped
    def groups_connected(self, generation: int, cohort: int) -> None:
        """Connects the groups: all ranks of the generation have come."""
        if self.is_stuck:
            return
        if self.machine.state is State.CONNECTING and generation == self._connecting and not self.is_idle:
            self._activity += 1
            self.cohort = cohort
            self.groups.connect(generation, cohort, self.world.rendezvous.said)
            self.machine.connected()
            if self.machine.is_over(generation):
                self.groups.take_down()  # the stop came before there were groups to close
            self.go()

    def _fall_out(self, why: str) -> None:
        self.world.transfers.leave(self.process)
        self.world.rendezvous.leave(self.process)
        self.machine.fell_out("recovery", why)
        self.go()

    def _load(self, move: moves.Load) -> None:
        step = self._loading_step = move.order.resume_step
        self._reads_checkpoint = False
        self._is_unnoticed &= move.action is Action.STAY
        self.is_in_doubt = False
        if move.action in (Action.RESTORE, Action.REWIND):
            self.snapshots.cancel()
        if move.action is Action.RESTORE:
            self.parameters += (INCOMPLETE,)  # partly overwritten, until all buckets have arrived
        if move.action is Action.REWIND:
            rows, self._reads_checkpoint = self.rewind(step)
            self._take_over(rows)
            if self._reads_checkpoint and self._refuses():
                return self.go()  # before it sends anything
        self._resumed_at = step
        self._has_loaded = move.action in (Action.RESTORE, Action.REWIND)
        self._is_restored |= self._has_loaded and move.order.generation > 1
        self.snapshots.kept_step, rank = move.order.kept_step, self.machine.rank
        self._to_do = [*move.receives(rank), *move.sends(rank), *move.sends_copies(rank)]
        if self._to_do:
            self._is_waiting = True
            self._begin(CONNECT_DEADLINE_S, Activity.FALL_OUT, "the transfer did not end")
            self._next_transfer()
            return
        reading_s = self.world.draw(self._durations.restore_s) if move.action is Action.REWIND else 0.0
        self._begin(reading_s, Activity.LOADED)

    def _next_transfer(self) -> None:
        self.world.transfers.come(self, self.machine.generation, self._to_do.pop(0), self._loading_step)

    @held_while_stopped
    def received(self, parameters: History, shard: str | None, rows: Rows) -> None:
        """Handles the arrival of a transfer's last bucket."""
        if self.machine.state is State.LOADING and not self.is_stuck:
            self.parameters, self.shard = parameters, shard
            self._take_over(rows)
            self._loaded(1)

    def _take_over(self, rows: Rows) -> None:
        """Takes the rank's own value from the table that came with the restored parameters."""
        self.local.restored(self.machine.rank, rows)
        if self._compares_state and any(step <= INCOMPLETE for step in self.parameters):
            self._is_unnoticed = True  # a source was wrong, and not compared yet
        else:
            self.world.oracle.restored(self, self._loading_step)

    @held_while_stopped
    def transfer_broke(self) -> None:
        """Drops out of the recovery, because the connection of a transfer has broken."""
        if self.machine.state is State.LOADING and not self.is_idle:
            self._begin(0.0, Activity.FALL_OUT, "connection reset by peer")

    @held_while_stopped
    def sent(self) -> None:
        """Handles the end of a transfer at its source: the receivers have all buckets."""
        self._loaded(0)

    def _loaded(self, received_bytes: int) -> None:
        if self.machine.state is not State.LOADING or self.is_stuck or not self.is_alive:
            return
        if self._to_do:
            self._next_transfer()
            return
        self._activity += 1
        if received_bytes and self._refuses():
            return self.go()
        if self._has_loaded:
            self._may_be_wrong()
        self.machine.loaded(received_bytes, from_checkpoint=self._reads_checkpoint)
        self.snapshots.resumed(self._loading_step, self.machine)
        self.go()

    def _may_be_wrong(self) -> None:
        """Lets a fault make the state another one than was loaded, or than the next update makes of it elsewhere."""
        membership, rank = self.machine.membership, self.machine.rank
        if not self._compares_state or not self.world.wrong_loads or membership is None or rank is None:
            return
        if self._loading_step >= self.world.layout.num_steps_of(rank):
            return  # no step follows in which it would be compared
        if len(membership.replicas[membership.shard(rank)]) > 1:
            if self.world.wrong_loads.pop():
                self._is_wrong_later = True
            else:
                self._become_wrong()

    def _become_wrong(self) -> None:
        self.parameters += (INCOMPLETE - self.process,)  # if all replicas were wrong in the same way, none could tell
        self._is_unnoticed = True

    @property
    def _compares_state(self) -> bool:
        membership = self.machine.membership
        has_replicas = membership is not None and len(membership.shards) < membership.world_size
        return self.world.layout.compares and has_replicas

    def _is_compared(self, step: int) -> bool:
        return self._compares_state and follows_recovery(step, self._resumed_at, self.machine.generation)

    def _compared(self, step: int, rows: Rows) -> None:
        """Judges what all ranks have said of their state."""
        machine, world = self.machine, self.world
        shards = [str(world.shard_of(rank)).encode() for rank in range(len(rows))]
        said = [Said(shard, str(row // 2).encode(), row % 2 == 1) for shard, row in zip(shards, rows, strict=True)]
        verdict = judge(said)
        if not verdict.refused:
            self._is_restored &= step <= self._resumed_at
            if self._is_unnoticed:  # no replica is left that could tell: it is the job's state from now on
                self.parameters, self._is_unnoticed = tuple(range(step)), False
            self.sealed(self.snapshots.confirm(self.parameters))
            return self._may_be_synced(step)
        if machine.rank in verdict.refused:
            self._is_unnoticed = False
            self.parameters += (INCOMPLETE,)
            world.oracle.refuses_load(self)
            machine.refused("it differs from its replicas")
            self.local.undo()
            machine.undone()
        else:
            machine.breaks_off()
        self.go()

    def _refuses(self) -> bool:
        """Returns whether a fault makes the state another one than was loaded. This process reports it then."""
        if not self.world.num_loads_refused:
            return False
        self.world.num_loads_refused -= 1
        self.world.oracle.refuses_load(self)
        self.parameters += (INCOMPLETE,)
        self.machine.refused("the state is not what was loaded")
        return True

    def _save(self) -> None:
        self.machine.saved(self.world.checkpoint(self, len(self.parameters)))
        self.go()

    def _save_and_end(self, move: moves.SaveAndEnd) -> None:
        at = self.machine.steps.parameters_at
        is_doubted = move.order.in_doubt and self.machine.doubt is not None
        is_saved = at is not None and (is_doubted or not self.machine.partially_updated)
        path, error = (f"rescued-{self.machine.rank}.pt", None) if is_saved else (None, "its copy is not whole")
        self.world.oracle.silence.is_rescue |= is_saved
        self._say(msg.StateRescued(self.number, path, error))
        self.die(Cause.EXIT, f"exit code {EXIT_TOO_FEW_RANKS}")

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        machine = self.machine
        step = machine.steps.parameters_at
        assert step is not None
        self._is_waiting = False
        if not self._is_unnoticed:
            self.world.oracle.stands_at(self, step)
        if step >= self.world.layout.num_steps_of(machine.rank):
            machine.finished(repr(self.parameters))
            self.go()
            return
        self.world.oracle.drain.begins_step(self, step)
        self.world.oracle.members.begins_step(self)
        self._gradients = None
        self.take_snapshot(step, is_compared=self._is_compared(step))
        self.local.begin_step()
        self.groups.begin_step()
        machine.steps.advance(StepEvent.STEP_ENTERED)
        self._show()
        forward_s = self._durations.forward_s
        if self.world.layout.first_batch_s and not self._has_read:
            self._has_read = True
            forward_s += self.world.layout.first_batch_s
        self._begin(self.world.draw(forward_s), Activity.FORWARD)

    def _is_copied(self) -> None:
        step, is_at_it = self.machine.steps.step, self._awaits_copy == self._activity and not self.is_stuck
        if is_at_it:
            self._is_waiting = not self.snapshots.is_copying
        if is_at_it and self.snapshots.is_complete(step):
            self._is_waiting = False
            self._synced(step)

    def _work(self) -> None:
        """Ends forward or backward, after the operations in groups that are a part of them."""
        machine = self.machine
        if machine.interrupted:
            self.go()
            return
        if self.groups.waits():
            return
        if machine.steps.phase is Phase.FORWARD:
            machine.steps.advance(StepEvent.BACKWARD_BEGUN)
            self._show()
            self.groups.begin_backward()
            self._begin(self.world.draw(self._durations.backward_s), Activity.BACKWARD)
        else:
            self._enter(machine.steps.step, "gradients")

    def _enter(self, step: int, what: str, value: int | None = None) -> None:
        self._entered = step, what
        self.groups.enter_world(step, what, self.local.value if value is None else value)

    def wait_in(self, key: Key) -> None:
        """Makes the training thread wait in a collective."""
        self.in_collective = key
        self.entered_s = self.world.schedule.now_s
        self._activity += 1
        self._progress += 1
        self.is_idle = False

    @held_while_stopped
    def parts_arrived(self, key: Key) -> None:
        """Handles the arrival of the last part that this process needs in a collective."""
        self.world.collectives.arrived(key, self.process)

    @held_while_stopped
    def collective_ended(self, key: Key, rows: Rows) -> None:
        """Handles the end of a collective: all parts have arrived."""
        if self.in_collective != key or self.is_stuck:
            return
        machine, (step, what) = self.machine, self._entered
        self.in_collective = None
        self._progress += 1
        if self.groups.ended(key, rows):
            self._work()
        elif what == "build":
            self.local.gathered(rows)
            self._built()
        elif what == "barrier":
            self.go() if machine.interrupted else self._update()
        elif what == "reduce":
            self._complete()
        elif machine.interrupted or machine.used_echo:
            self.go()
        elif what == "compare":
            self._compared(step, rows)
        elif self._is_compared(step):
            self._gradients = step
            self.local.gathered(rows)
            said = 2 * zlib.crc32(repr(self.parameters).encode()) + self._is_restored
            self._enter(step, "compare", said)
        else:
            self._gradients = step
            self.local.gathered(rows)
            self._may_be_synced(step)

    def _may_be_synced(self, step: int) -> None:
        """Becomes synced, once the snapshots are there."""
        if not self.snapshots.is_complete(step):
            self._activity += 1
            self._awaits_copy, self._is_waiting = self._activity, not self.snapshots.is_copying
        else:
            self._synced(step)

    def _synced(self, step: int) -> None:
        machine = self.machine
        if machine.interrupted or machine.used_echo:
            self.go()
            return
        machine.steps.advance(StepEvent.GRADIENTS_SYNCED)
        self._show()
        self._heed(machine.settled(), machine.target_generation)
        self.go() if self.machine.interrupted else self._enter(step, "barrier")

    def _cut_off(self) -> None:
        """Ends a collective with an error. In a backward its result is an echo; a barrier is not passed."""
        machine = self.machine
        if machine.state is State.BUILDING:
            machine.echoed()
            self._built()
            return
        if machine.steps.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            machine.echoed()
        if machine.steps.phase is Phase.OPTIMIZER:
            machine.lost_value()
            self._complete(self.world.fate_of_lost_value())
        else:
            self.go()

    @held_while_stopped
    def peer_reset(self, key: Key) -> None:
        """Breaks the connection to a peer in the middle of a collective."""
        if self.in_collective != key:
            return
        count = self.groups.count()
        self._heed(self.machine.settled(), 0)
        assert count is not None
        report = self.machine.collective_failed(count.group, "connection reset by peer")
        if report is not None:
            self._say(report)
        self._leave_groups()
        if self.in_collective is not None:
            self._interrupt()

    def _update(self) -> None:
        """Begins the update, after the gradient barrier or by order."""
        self.world.oracle.commits(self, self.machine.steps.step)
        self.snapshots.passed_barrier(self.machine.rank)
        self.machine.steps.advance(StepEvent.BARRIER_LEFT)
        self._show()
        follows = Activity.REDUCE if self.world.layout.reduces_after_update else Activity.COMPLETE
        self._begin(self.world.draw(self._durations.optimizer_s), follows)

    def _reduce(self) -> None:
        """Runs a collective after the update. The seed decides what becomes of its value if it is cut off."""
        self.machine.communicates_in_update = True
        if self.machine.interrupted:
            self._cut_off()
        else:
            self._enter(self.machine.steps.step, "reduce")

    def _complete(self, lost: LostValue = LostValue.NOWHERE) -> None:
        machine, step = self.machine, self.machine.steps.step
        update = {LostValue.WRITTEN: INCOMPLETE, LostValue.DECIDED_ALONE: INCOMPLETE - self.process}.get(lost, step)
        self.parameters += (update if self._gradients == step else INCOMPLETE,)
        self._gradients = None
        machine.steps.advance(StepEvent.STEP_COMPLETED)
        self._show()
        if lost is not LostValue.NOWHERE:
            self.is_in_doubt = lost is not LostValue.WRITTEN
            machine.found_partially_updated(f"{hash(self.parameters):x}" if self.is_in_doubt else None, "cut off")
            self.world.oracle.harmed(self)
        else:
            machine.found_whole()
            self.world.step_completed(self, step)
            is_compared = step + 1 < self.world.layout.num_steps_of(machine.rank)
            if self._is_wrong_later and step == self._resumed_at and is_compared:
                self._become_wrong()
        self.go()
