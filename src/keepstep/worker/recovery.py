"""Performs a recovery on one rank, in its training thread: CLEAN, RESTORE, ROLLBACK."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, assert_never

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from keepstep.cancel import Cancelled
from keepstep.errors import (
    InternalError,
    NothingToRecoverFrom,
    PeerLost,
    RemoteProtocolError,
    StateMismatch,
    StepInterrupted,
)
from keepstep.procfs import bytes_moved
from keepstep.protocol.messages import CheckpointWritten, Rescue, StateMoves, Transfer, text
from keepstep.protocol.moves import Build, End, Load, Save, SaveAndEnd, Train, Undo, Update
from keepstep.protocol.resume import Action
from keepstep.weights.device.stages import CannotGoOn
from keepstep.weights.memory.pieces import Held
from keepstep.worker.coordination import Coordination
from keepstep.worker.publication import StepPublication
from keepstep.worker.state.checkpoint import Checkpoints, rescue, rescue_parent
from keepstep.worker.state.dcp.content import Share
from keepstep.worker.state.digests import named_digests
from keepstep.worker.state.image import StateHeader, describe
from keepstep.worker.state.layout import digest_of_copy
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import Landing, Source, StateTransport, receive_state, send_state
from keepstep.worker.step.attempt import Attempt
from keepstep.worker.step.barrier import Votes
from keepstep.worker.step.snapshots import Snapshots

_REPORTED_S = 5.0
"""Interval at which a rank says that it moves its state: a twelfth of the time after which a rescue counts as stuck."""
_MOVED_BYTES = 1 << 20
"""Fewer bytes are no part of the state: this process also reads its own counters and writes messages."""


class Recovery:
    """Performs one rank's recoveries. All methods run in the training thread, at a safe point."""

    def __init__(
        self,
        coordination: Coordination,
        state: ProtectedState,
        attempt: Attempt,
        checkpoints: Checkpoints | None,
        snapshots: Snapshots | None,
        run_dir: str,
        checkpoint_root: str | None,
    ) -> None:
        self._coordination = coordination
        self._run_dir = run_dir
        self._checkpoint_root = checkpoint_root
        self._machine = coordination.machine
        self._state = state
        self._attempt = attempt
        self._checkpoints = checkpoints
        self._snapshots = snapshots
        self._resumed = False
        self._source, self._landing = Source(), Landing(state.device)
        self._num_buckets = 0
        """How many buckets of a state it has sent and received so far."""
        self._has_told_of_replicas = False
        self._has_told_of_snapshots = self._has_told_of_rescue = False
        self._publication: StepPublication | None = None
        self._agreed_step: int | None = None
        """The step at which all ranks can write their parts of a checkpoint; None if one is still writing."""
        self._generation: int | None = None
        """The generation in which this rank trained last."""
        coordination.snapshots = self.snapshots
        if snapshots is not None:
            coordination.second_copies = snapshots.second_copies
        coordination.digests = lambda: named_digests(state)
        coordination.digest_of_copy = lambda: digest_of_copy(state)
        coordination.save_state_dicts = lambda path: torch.save(state.state_dicts(), path)
        coordination.missing_values.protected = lambda: (tensor for _name, tensor in state.live_tensors())

    @property
    def checkpointing(self) -> bool:
        """Whether this job writes checkpoints."""
        return self._checkpoints is not None

    def publish(self, publication: StepPublication) -> None:
        """Publishes the weights from now on."""
        self._publication = publication
        self._coordination.break_off = publication.interrupt

    def _stand_ready(self) -> None:
        """Prepares this rank to train in the current generation."""
        if self._machine.generation != self._generation:
            self._generation = self._machine.generation
            self._tell_of_replicas()
            self._tell_of_rescue()
            self._state.layout.new_generation()
        rank, at = self._machine.rank, self._machine.steps.parameters_at
        if self._publication is not None and rank is not None and at is not None:
            self._publication.stand_ready(rank, dist.get_world_size(), self._machine.generation, at)

    def _tell_of_replicas(self) -> None:
        """Warns once, on rank 0, if the loss of some ranks would end the job or take it far back."""
        rank, membership = self._machine.rank, self._machine.membership
        if self._has_told_of_replicas or rank != 0 or membership is None or not self._state.is_sharded:
            return
        if self.takes_snapshots:
            return
        self._has_told_of_replicas = True
        alone = sorted(ranks[0] for ranks in membership.replicas.values() if len(ranks) == 1)
        if alone:
            what = (
                "takes the job back to its newest checkpoint"
                if self.checkpointing
                else "ends the job with exit code 75"
            )
            print(
                f"keepstep: {len(alone)} of {membership.world_size} ranks hold a part of the state that no other rank "
                f"holds (the first is rank {alone[0]}): the loss of one {what}; with "
                'protect(snapshot_every="auto") it would not',
                file=sys.stderr,
                flush=True,
            )

    def _tell_of_rescue(self) -> None:
        """Warns once, on the first rank of each node, if a rescue could not write to the working directory."""
        assigned = self._machine.assignment
        if self._has_told_of_rescue or (assigned is not None and assigned.local_rank != 0):
            return
        self._has_told_of_rescue = True
        try:
            parent = rescue_parent(self._run_dir, self._checkpoint_root)
            if parent.samefile(self._checkpoint_root or os.curdir):
                return
            where = f"would be in {parent}"
        except OSError as error:  # also: the working directory is deleted
            where = f"could not be written: {error}"
        print(
            f"keepstep: the working directory is not writable: the state that a job saves when it cannot go on {where}",
            file=sys.stderr,
            flush=True,
        )

    def start_together(self, rank: int, world_size: int, store: Store) -> None:
        """Prepares the checkpoints of a sharded state while all ranks start; see `Checkpoints.start_together`."""
        if self._checkpoints is not None and self._state.is_sharded:
            self._checkpoints.start_together(rank, world_size, store)

    def inspect_checkpoints(self) -> None:
        """Finds an intact checkpoint, if there is any; see `Checkpoints.inspect`."""
        if self._checkpoints is not None:
            self._checkpoints.inspect()

    @property
    def _saves(self) -> bool:
        """Whether this rank writes the checkpoints of its replica group."""
        rank, membership = self._machine.rank, self._machine.membership
        return rank is not None and membership is not None and membership.is_first_replica(rank)

    @property
    def _share(self) -> Share:
        """This rank's part of a checkpoint."""
        membership = self._machine.membership
        return Share(self._machine.rank or 0, membership.shards if membership is not None else ())

    def snapshots(self) -> tuple[int, ...]:
        """Steps of the snapshots and checkpoints that this rank can load, ascending."""
        steps: set[int] = set(self._checkpoints.steps()) if self._checkpoints is not None else set()
        if self._snapshots is not None:
            self._take_in(self._snapshots)
            steps.update(self._snapshots.steps(self._machine.rank))
        return tuple(sorted(steps))

    def _take_in(self, snapshots: Snapshots) -> None:
        """Adds the snapshots of other processes that the agent has reported."""
        while self._machine.inherited:
            kept = self._machine.inherited.pop(0)
            snapshots.inherit(kept.path, kept.rank, kept.steps)

    def steps_in_memory(self) -> tuple[int, ...]:
        """Steps of this rank's snapshots in memory, ascending; empty if no snapshots are taken."""
        if self._snapshots is None or self._snapshots.every == 0:
            return ()
        return self._snapshots.steps(self._machine.rank)

    @property
    def takes_snapshots(self) -> bool:
        """Whether a partially updated copy can go back: snapshots are taken, or there is only one rank."""
        membership = self._machine.membership
        is_alone = membership is not None and membership.world_size == 1
        return is_alone or (self._snapshots is not None and self._snapshots.every != 0)

    def hand_out(self, step: int) -> None:
        """Begins the snapshot of a yielded step, if one is due."""
        if self._snapshots is not None:
            self._snapshots.hand_out(step, is_compared=self._attempt.may_be_refused(step))

    def take_ahead(self, ahead: Callable[[int], bool]) -> None:
        """See `SnapshotSchedule.ahead`."""
        if self._snapshots is not None:
            self._snapshots.take_ahead(ahead)

    def before_barrier(self) -> None:
        """Waits until the snapshot of the step is complete, before this rank reports that it is synced."""
        if self._snapshots is not None and not self._coordination.interrupted:
            self._snapshots.complete(self._machine.steps.step, self._coordination.page.set_waiting)

    def votes(self) -> tuple[int, bool]:
        """Returns this rank's votes in the gradient barrier of this step.

        They are the number of steps between two snapshots (`Snapshots.proposal`; 0: none), and whether this rank is
        still writing its part of a checkpoint, because either all ranks write one or none does.
        """
        step = self._machine.steps.step
        every = self._snapshots.proposal(step) if self._snapshots is not None else None
        return every or 0, self._checkpoints is not None and self._checkpoints.is_busy()

    def passed_barrier(self, agreed: Votes | None) -> None:
        """Uses the result of the gradient barrier: every rank is synced, and has its snapshot.

        Args:
            agreed: the greatest of all ranks' votes; None: a failure came.
        """
        # Without a result this rank does not know whether another one is still writing, so it begins no checkpoint.
        is_any_busy = agreed is None or agreed.is_busy
        self._agreed_step = None if is_any_busy else self._machine.steps.step + 1
        if self._snapshots is None:
            return
        self._snapshots.passed_barrier()
        if agreed is not None and agreed.every:
            self._snapshots.agreed(agreed.every)
            self._tell_of_snapshots(agreed.every)

    def _tell_of_snapshots(self, every: int) -> None:
        """Reports once, on rank 0, how often snapshots are taken and how much memory they need."""
        if self._machine.rank == 0 and not self._has_told_of_snapshots and self._snapshots is not None:
            self._has_told_of_snapshots = True
            each = "each step" if every == 1 else f"every {every} steps"
            where = "their nodes, and of a second node" if self._snapshots.has_buddy else "their nodes"
            print(
                f"keepstep: {each} all ranks copy their state into the memory of {where}, for no other rank holds "
                f"it: 2 x {self._snapshots.num_bytes / 1e6:.3g} MB on rank 0 (snapshot_every)",
                file=sys.stderr,
                flush=True,
            )

    def take_resumed(self) -> bool:
        """Returns whether this is the first step since a recovery, and clears that flag."""
        resumed, self._resumed = self._resumed, False
        return resumed

    # ---- where it is called from ------------------------------------------------------------------------------------

    def write_checkpoint(self) -> None:
        """Writes a checkpoint if one is due. Call it when the script asks for the next step: the checkpoint contains
        what the script did after the ``with``."""
        machine, share = self._machine, self._share
        step = machine.steps.step + 1
        may_write = self._saves and (share.is_all or self._agreed_step == step)
        if self._checkpoints is None:
            return
        if (written := self._checkpoints.take_written()) is not None:
            self._coordination.link.send(CheckpointWritten(self._coordination.link.worker, written))
        if may_write and not machine.partially_updated:
            self._checkpoints.after_step(step, machine.generation, share)

    def decide_at_barrier(self) -> None:
        """Reports, after a failure in the gradient barrier, that this rank can be at this step or the next, and waits.

        Raises:
            StepInterrupted: the step must be undone, by `Attempt.undo`.
        """
        match self._coordination.next_move():
            case Update():
                return
            case Undo():
                raise StepInterrupted
            case SaveAndEnd() as move:
                self._rescue(move.order)
            case move:
                raise InternalError(f"rank {self._machine.rank} stands in the gradient barrier and is to {move}")

    def after_step(self) -> None:
        """Publishes the weights of a complete step, if due.

        A recovery from a failure waits until the script asks for the next step. Until then the script runs on survivors
        only, so its collectives must not meet the replacement: they echo.
        """
        machine = self._machine
        if self._publication is not None and not machine.partially_updated:
            self._publication.after_step(machine.steps.step + 1, self._coordination.interrupted)

    def after_last_step(self) -> None:
        """Writes the checkpoint of the last step, if one is due, and waits for all that is in progress.

        At the barrier of that step a rank may still have been writing an earlier checkpoint.
        """
        checkpoints, machine = self._checkpoints, self._machine
        step = machine.steps.parameters_at
        may_write = self._saves and not machine.partially_updated
        if checkpoints is not None and may_write and step is not None and checkpoints.is_due(step):
            checkpoints.write_now(step, machine.generation, self._share)
        self.flush()

    def flush(self) -> None:
        """Waits for the checkpoint, the snapshot and the publication that are in progress."""
        if self._checkpoints is not None:
            self._checkpoints.flush()
        if self._snapshots is not None:
            self._snapshots.flush()
        if self._publication is not None:
            self._publication.flush()

    def run(self) -> Train | End:
        """Performs all pending recoveries, over any number of generations. Returns the move that follows."""
        while True:
            match self._coordination.next_move():
                case Undo():
                    self._attempt.undo()
                case Load() as move:
                    self._load(move)
                case Save() as move:
                    self._drain(move.step)
                case SaveAndEnd() as move:
                    self._rescue(move.order)
                case Train() as move:
                    self._stand_ready()
                    return move
                case End() as move:
                    return move
                case Build() | Update() as move:
                    raise InternalError(f"rank {self._machine.rank} stands between two steps and is to {move}")
                case move:
                    assert_never(move)

    # ---- the parts of a recovery ------------------------------------------------------------------------------------

    def _load(self, move: Load) -> None:
        """Brings this rank to the resume step, and sends its state to ranks that need it."""
        coordination = self._coordination
        coordination.observe("restore")
        coordination.page.set_waiting(True)  # each side waits for the other
        moving = _Moving(self._tell_of_moves, lambda: self._num_buckets)
        try:
            received, from_checkpoint = self._get_there(move)
        except (RuntimeError, RemoteProtocolError, PeerLost, CannotGoOn, Cancelled) as error:
            coordination.fell_out("restore", error)
            return
        except StateMismatch as error:
            if move.order.generation == 1:  # nothing has been trained
                raise
            coordination.refused(error)
            return
        finally:
            moving.end()
            coordination.page.set_waiting(False)
        self._machine.loaded(received, from_checkpoint=from_checkpoint)
        order, rank, membership = move.order, self._machine.rank, self._machine.membership
        assert rank is not None
        self._attempt.resumed(
            order.resume_step, is_restored=order.generation > 1 and move.action in (Action.RESTORE, Action.REWIND)
        )
        if self._snapshots is not None:
            self._snapshots.resumed(order.resume_step, rank, membership, order.kept_step)
        if move.action in (Action.RESTORE, Action.REWIND):
            coordination.show()
        self._resumed = move.order.resume_step > 0 or move.order.generation > 1

    def _get_there(self, move: Load) -> tuple[int, bool]:
        """Performs this rank's action, and sends its state to ranks that need it.

        Returns:
            the number of bytes received, and whether a checkpoint was loaded.
        """
        step, rank = move.order.resume_step, self._machine.rank
        assert rank is not None
        received, from_checkpoint = 0, False
        self._attempt.drain_device()  # other streams than the update's read or write the state
        if self._snapshots is not None:
            self._take_in(self._snapshots)  # a warm spare learns of them after it has reported what it holds
            if move.action in (Action.RESTORE, Action.REWIND):
                self._snapshots.release_state()
        match move.action:
            case Action.RESTORE:
                for transfer in move.receives(rank):
                    received = self._receive(step, transfer, rank)
                self._state.layout.restored()
            case Action.REWIND:
                from_checkpoint = self._rewind(step, rank)
                self._state.layout.restored()
            case Action.STAY | Action.ADVANCE:
                pass
        for transfer in move.sends(rank):
            header, blocks = describe(self._state, step)
            self._send(header, [block.held for block in blocks], transfer, rank)
        for transfer in move.sends_copies(rank):
            if self._snapshots is None:
                raise RemoteProtocolError(f"rank {rank} keeps no snapshots, and is to send one of step {step}")
            self._send(*self._snapshots.image(transfer.receivers, step), transfer, rank)
        self._attempt.drain_device()
        return received, from_checkpoint

    def _send(self, header: StateHeader, held: Sequence[Held], transfer: Transfer, rank: int) -> None:
        send_state(header, held, rank, transfer, self._transport(), self._source, self._moved)

    def _receive(self, step: int, transfer: Transfer, rank: int) -> int:
        return receive_state(self._state, step, rank, transfer, self._transport(), self._moved, self._landing)

    def _rewind(self, step: int, rank: int) -> bool:
        """Loads this rank's own snapshot of a step, or else a checkpoint. Returns whether it was a checkpoint."""
        if self._snapshots is not None and self._snapshots.load(rank, step):
            return False
        if self._checkpoints is None:
            raise RemoteProtocolError(f"rank {rank}: its snapshot of step {step} is gone")
        self._checkpoints.load(step)
        return True

    def _transport(self) -> StateTransport:
        """Returns the transport of the state. Raises RuntimeError if a failure has taken the group down already."""
        stop = self._coordination.broken
        stop.clear()  # before the check of the group: a failure sets it after taking the group down
        assert self._coordination.groups is not None
        inner = self._coordination.groups.world.inner
        if inner is None or not inner.is_up:
            raise RuntimeError("the group was taken down before the transfer began")
        return StateTransport(inner, stop)

    def _tell_of_moves(self) -> None:
        self._coordination.link.send(StateMoves(self._coordination.link.worker))

    def _moved(self) -> None:
        self._num_buckets += 1
        self._coordination.page.progress()
        self._coordination.observe("bucket")

    def _drain(self, step: int) -> None:
        """Writes a checkpoint and waits for the publication in progress: the job ends at this step."""
        is_saved = False
        if self._checkpoints is not None and self._saves:
            is_saved = self._checkpoints.write_now(step, self._machine.generation, self._share)
        if self._publication is not None:
            self._publication.flush()
        self._machine.saved(is_saved)

    def _rescue(self, order: Rescue) -> NoReturn:
        """Saves this rank's state, if its copy is whole, and ends the process: the job cannot continue."""
        at = self._machine.steps.parameters_at
        path, problem = None, None
        self._coordination.page.set_waiting(True)  # storage may be slow
        moving = _Moving(self._tell_of_moves, lambda: self._num_buckets)
        try:
            is_doubted = order.in_doubt and self._machine.doubt is not None
            if (self._machine.partially_updated and not is_doubted) or at is None:
                raise NothingToRecoverFrom("its copy is not whole")
            self._attempt.undo()
            if self._checkpoints is not None and not (self._share.is_all or order.in_doubt):
                path = self._checkpoints.rescue(at, self._share)
            else:
                path = rescue(
                    self._state,
                    at,
                    self._share,
                    rescue_parent(self._run_dir, self._checkpoint_root),
                    in_doubt=order.in_doubt,
                )
        except (OSError, RuntimeError, StateMismatch, NothingToRecoverFrom) as error:
            problem = text(error)
        moving.end()
        self._coordination.end(order, path, problem)


class _Moving:
    """A thread that reports every few seconds if this process has moved more of a state: to or from files, or peers.

    Where no thread can be started nothing is reported, and the state is moved all the same.
    """

    def __init__(self, report: Callable[[], None], num_buckets: Callable[[], int]) -> None:
        self._report, self._num_buckets = report, num_buckets
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keepstep-moving", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._is_over.set()

    def _watch(self) -> None:
        bytes_before, buckets_before = bytes_moved(), self._num_buckets()
        while not self._is_over.wait(_REPORTED_S):
            num_bytes, num_buckets = bytes_moved(), self._num_buckets()
            if num_bytes - bytes_before >= _MOVED_BYTES or num_buckets > buckets_before:
                bytes_before, buckets_before = num_bytes, num_buckets
                self._report()

    def end(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
