"""Connects the worker's state machine to its threads, communicators, tag page, and link to the agent.

Two threads use it. The link's listener (and gloo's threads, when a collective fails) call `on_order` and `failed`: they
pass the event to the machine, which sets a flag, and close the groups. The training thread checks the flag at its safe
points and asks `next_move` for its next move; no other thread touches parameters.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from keepstep.cancel import CancelToken
from keepstep.config import adopt_rank
from keepstep.errors import InternalError, PeerLost, StateMismatch
from keepstep.protocol import moves
from keepstep.protocol.messages import (
    DumpTraceback,
    Rescue,
    SnapshotsByRank,
    StateRescued,
    Stop,
    Terminate,
    WorkerOrder,
    WorkerReady,
    text,
)
from keepstep.protocol.phases import Phase, StepEvent
from keepstep.protocol.recovery import EXIT_TOO_FEW_RANKS
from keepstep.protocol.waiting.operations import Operation
from keepstep.protocol.worker import Urgency, WorkerMachine, WorkerState
from keepstep.shared import tracebacks
from keepstep.shared.tagpage import SnapshotMoment, TagWriter
from keepstep.worker.groups.objects import is_asked_for_prefix
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.link import Link
from keepstep.worker.process.termination import restore_default
from keepstep.worker.values.missing import MissingValues, line_of_script

ORDER_DEADLINE_S = 3600.0
"""How long a worker waits for an order. The controller has its own deadlines; this one ends the wait for a lost
controller."""
NO_RANK = -1
"""torch's number of a process that has no rank in a group."""
SETTLE_S = 0.25
"""How long a backward may continue after a `Stop`, if the lost rank was synced in that step. The backward ends within
milliseconds, because the lost rank had sent its data. After another loss it may wait for data that never comes."""
SIGN_OF_LIFE_S = 0.1
"""Interval at which a rank in `knows_failure` shows progress; less than any deadline of a phase."""

Work: TypeAlias = (
    moves.Build | moves.Undo | moves.Update | moves.Load | moves.Train | moves.Save | moves.End | moves.SaveAndEnd
)
"""A move that the caller of `next_move` performs, because it concerns the script or the state."""


class Coordination:
    """One rank's part in its job. Implements `keepstep.worker.groups.observer.GroupObserver`.

    Other threads pass events to the machine and read its decision under one lock. No thread holds the lock while it
    waits, closes groups, or sends. Only the training thread reports the results of moves, without the lock. Any thread
    reads fields without the lock.
    """

    def __init__(self, link: Link, page: TagWriter, pid: int, rank: int | None) -> None:
        self.link = link
        self.page = page
        self.machine = WorkerMachine(link.worker, pid, rank)
        self.groups: GroupRegistry | None = None
        self.observe: Callable[[str], None] = lambda moment: None
        """Called with the name of each moment of a recovery, for drills."""
        self.snapshots: Callable[[], tuple[int, ...]] = lambda: ()
        """Returns the steps of the checkpoints and snapshots that this rank can load. Called by the training thread."""
        self.second_copies: Callable[[], SnapshotsByRank] = tuple
        """Returns the second copies that this worker keeps for other ranks. Called by the training thread."""
        self.digests: Callable[[], Mapping[str, tuple[str, tuple[float, float, float] | None]]] = dict
        """Returns the digest of each protected value, and the sketch of a tensor, by name (`state.digests.Seen`).
        Drills call it in the training thread."""
        self.save_state_dicts: Callable[[Path], None] = lambda path: None
        """Has torch save the ``state_dict()`` of each protected object. Drills call it in the training thread."""
        self.broken = CancelToken()
        """Set by any thread after it has closed the groups. Cancels the transfer of state."""
        self.break_off: Callable[[], None] = lambda: None
        """Called by any thread that closes the groups after a loss, to end other work that needs all ranks."""
        self.break_wait: Callable[[], None] = lambda: None
        """Called likewise, to end the training thread's wait for a key of the store."""
        self.framework_step: int | None = None
        """The last step before the present one, as the framework counts whose loop runs; None: it is no framework's.
        For drills."""
        self._was_spare = rank is None
        """Whether the environment variables do not contain the rank yet."""
        self.attempting = False
        """Whether a step was yielded and is not complete. An interruption then undoes the script's changes."""
        self.is_warming_up = False
        """Whether this is a spare that acts as rank 0, to warm up or in `Session.pretending`."""
        self.leaves_between_steps = False
        """Whether the loop can abandon its work between the yield of a step and its beginning, and repeats it."""
        self._update: FrameType | None = None
        """Frame of the call of a protected optimizer's ``step()`` that is running or has raised."""
        self.updates_alone = True
        """Whether the last call of ``step()`` ran no collective."""
        self.reduced_behind_update = False
        """Whether a backward has communicated since this rank left the last gradient barrier."""
        self._update_raised = False
        """Whether a ``step()`` has raised in this step and the script went on: its parameters may be half updated."""
        self._has_completed_step = False
        """Whether this process has completed a step."""
        self.missing_values = MissingValues()
        self.digest_of_copy: Callable[[], str] = str
        """Returns a digest of all that replicas hold alike."""
        self._training_thread = threading.get_ident()
        self._warned: set[str] = set()
        self._news = threading.Condition()
        """Guards the machine. Notified of every event that the training thread may wait for."""
        self._num_orders = 0
        self._groups_of = 0
        """The generation in which the groups are connected, or are being connected."""
        self._breaking = threading.RLock()
        """Held while the groups are taken down, and when they become those of another generation."""

    # ---- other threads --------------------------------------------------------------------------------------------

    def on_order(self, order: WorkerOrder) -> None:
        """Handles the part of an order that cannot wait for the training thread. Runs in the listener's thread."""
        if isinstance(order, DumpTraceback):
            tracebacks.dump(self.page.descriptor, self._training_thread)
            return
        if isinstance(order, Terminate) and not callable(signal.getsignal(signal.SIGTERM)):
            if restore_default():
                os.kill(os.getpid(), signal.SIGTERM)  # the agent's own signal may have come before
            return  # a script without a handler must not leave its loop and go on: it would seem complete
        with self._news:
            generation = self._groups_of
            urgency = self.machine.receive(order)
            holding = self.machine.holding()
            self._num_orders += 1
            self._news.notify_all()
        if holding is not None:
            self.link.send(holding)
        if urgency is Urgency.BREAK:
            self._break(generation)
        if isinstance(order, Stop):
            if urgency is Urgency.SETTLE:
                timer = threading.Timer(SETTLE_S, self.settled, [order.generation])
                timer.daemon = True
                timer.start()
            self.observe("stop")

    def settled(self, generation: int | None = None) -> None:
        """Closes the groups: the backward has ended, or its time (for the `Stop` of ``generation``) is over."""
        with self._news:
            groups_of = self._groups_of
            urgency = self.machine.settled(generation)
            self._news.notify_all()
        if urgency is Urgency.BREAK:
            self._break(groups_of)

    def _break(self, generation: int) -> None:
        """Breaks off all that goes on between ranks in a generation.

        Args:
            generation: `_groups_of` at the moment of the decision. By now the training thread may be connecting the
                next one, for another thread has done this meanwhile.
        """
        with self._breaking:
            if generation != self._groups_of:
                return
            if self.groups is not None:
                self.groups.take_down()
            self.link.fail_requests()
            self.broken.set()
            self.break_off()
            self.break_wait()

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        """Records that an operation of a group has begun."""
        self.page.operation_entered(group, operation, peer)
        if self.machine.steps.phase is Phase.OPTIMIZER:
            self.machine.communicates_in_update = True
            if self._update is not None and self.is_training_thread:
                self.updates_alone = False
            elif torch._C._current_graph_task_id() != -1:
                self.reduced_behind_update = True

    def awaited(self) -> None:
        """Records that a thread waits for an operation in flight."""
        self.page.operation_awaited()

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        """Records that an operation of a group has ended."""
        self.page.operation_left(group, operation, peer, was_awaited=was_awaited)

    def failed(self, group: str, error: BaseException) -> bool:
        """Reports the error of a collective once, and closes the groups. Returns whether the group must echo."""
        if self.completed:
            return False
        with self._news:  # under one lock: no `Stop` may begin to settle between the two calls
            generation = self._groups_of
            urgency = self.machine.settled()
            hint = self.machine.collective_failed(group, text(error))
            self._news.notify_all()
        if urgency is Urgency.BREAK or hint is not None:
            self._break(generation)
        if hint is not None:
            self.link.send(hint)
        return True

    def is_over(self, generation: int) -> bool:
        """Whether a newer generation has begun, so that groups must stop connecting."""
        return self.machine.is_over(generation)

    def knows_failure(self, within_s: float) -> bool:
        """Waits up to ``within_s`` seconds for a failure that interrupts this rank. Returns whether one is known.

        Meanwhile the rank shows progress, because it will go on by itself. Without that, the agent would count it as
        waiting for others, and a job in which all ranks wait past their deadline counts as stalled.
        """
        until_s = time.monotonic() + within_s
        with self._news:
            while not (self.interrupted or self.completed) and (left_s := until_s - time.monotonic()) > 0.0:
                self.page.progress()
                self._news.wait(min(left_s, SIGN_OF_LIFE_S))
        return self.interrupted

    def hears_of_drain(self, within_s: float) -> bool:
        """Waits up to ``within_s`` seconds for an order of a drain. Returns whether the job drains."""
        with self._news:
            return self._news.wait_for(lambda: self.machine.drains, within_s)

    def echoed(self, group: str) -> None:
        """Records that a group has answered a collective by echo."""
        self.machine.echoed()
        if self._is_for_good:
            self.machine.lost_value()
            self.missing_values.announce()
        elif self.leaves_between_steps:
            return
        elif self.machine.steps.phase is Phase.UPDATED and self.machine.steps.step >= 0:
            self._warn_once(
                f"generation {self.machine.generation}: a collective of group {group} outside of a step was cut off "
                "by a failure and holds this rank's own values only"
            )

    @property
    def _is_for_good(self) -> bool:
        """Whether the script's current work is permanent: after the gradient barrier, or after the step."""
        phase = self.machine.steps.phase
        return phase is Phase.OPTIMIZER or (
            phase is Phase.UPDATED and self.machine.state is WorkerState.TRAINING and not self.attempting
        )

    def missing(self, group: str, received: Sequence[object], *, is_decided: bool = False) -> None:
        """Tracks tensors that a cut-off collective did not fill. Runs in the thread that is about to get them.

        ``is_decided``: the script gets objects instead, which cannot be tracked.
        """
        if self.machine.in_doubt and self.is_training_thread:
            tensors = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
            self.missing_values.adopt(tensors, in_update=self._update is not None, is_decided=is_decided)
            if self._update is not None:
                return  # an update may have many collectives; `judge_copy` reports them
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: a failure cut off a collective "
                f"of group {group}; what it would have given is missing, at {line_of_script()}",
                file=sys.stderr,
            )

    @property
    def longest_timeout_s(self) -> float:
        """See `GroupRegistry.longest_timeout_s`; 0 before there is a group."""
        return 0.0 if self.groups is None else self.groups.longest_timeout_s

    def judge_copy(self, host: Callable[[], object]) -> None:
        """Decides whether this rank's copy is whole after cut-off collectives. Called when the script asks for a step.

        Args:
            host: returns the protected host values.
        """
        harm = self.missing_values.conclude(host)
        if self._update_raised and self.interrupted:
            self.machine.found_partially_updated(None, "optimizer.step() has raised and may have updated a part of it")
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: optimizer.step() has raised, and "
                "a rank was lost in the same step; this rank's copy may be half updated and has to be restored",
                file=sys.stderr,
            )
        elif self.machine.in_doubt and harm is None:
            self.machine.found_whole()
        elif self.machine.in_doubt and harm is not None:
            flaw = f"the value that a failure cut off may have got into {harm.where}"
            self.machine.found_partially_updated(self.digest_of_copy() if harm.is_doubt else None, flaw)
            counts = (
                "counts only if no other is left and a replica's equals it" if harm.is_doubt else "has to be restored"
            )
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: the value that a failure cut off "
                f"may have got into {harm.where}; this rank's copy {counts}. Before optimizer.step() such a "
                "collective does no harm",
                file=sys.stderr,
            )

    def await_rank(self) -> int:
        """Returns this process's rank. A spare waits until it gets one.

        A spare that warms up gets 0 at once: torch's compiler asks for the rank, to name its logs. torch's logs get
        torch's value for a process that has no rank.
        """
        machine = self.machine
        if machine.rank is None and is_asked_for_prefix():
            return NO_RANK
        if self.is_warming_up and machine.rank is None:
            return 0
        awaited = machine.await_rank()
        if awaited is not None:
            self.link.send(awaited)
            self.page.set_waiting(True)
            with self._news:
                self._news.wait_for(lambda: machine.rank is not None)
            self.page.set_waiting(False)
            self._adopt_rank()
        assert machine.rank is not None
        return machine.rank

    def _adopt_rank(self) -> None:
        """Writes the rank to the environment variables. Only the training thread may change them under the script."""
        if self._was_spare and (mine := self.machine.assignment) is not None:
            self._was_spare = False
            adopt_rank(mine.rank, mine.local_rank, mine.local_world_size)

    def ask_once(self, operation: str, name: str, value: bytes = b"") -> tuple[bool, bytes]:
        """See `Link.ask_once`. The agent does not take the wait for another process for a hang."""
        self.page.set_waiting(True)
        try:
            return self.link.ask_once(operation, name, ORDER_DEADLINE_S, value)
        finally:
            self.page.set_waiting(False)

    def wait_until_interrupted(self, timeout_s: float) -> None:
        """Blocks until a failure is known, or for ``timeout_s``. The agent does not take this for a hang."""
        self.page.set_waiting(True)
        with self._news:
            self._news.wait_for(lambda: self.machine.interrupted, timeout_s)
        self.page.set_waiting(False)

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"keepstep: {what}", RuntimeWarning, stacklevel=4)

    # ---- what is asked often ----------------------------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether the training thread must go to a safe point. Cheap: it is checked many times in a step."""
        return self.machine.interrupted

    @property
    def phase(self) -> Phase:
        """Where in a step this rank is."""
        return self.machine.steps.phase

    @property
    def is_in_later_step(self) -> bool:
        """Whether this rank is inside of a step, and has completed one before in this process."""
        return self._has_completed_step and self.phase is not Phase.UPDATED

    @property
    def is_training_thread(self) -> bool:
        """Whether the calling thread is the training thread."""
        return threading.get_ident() == self._training_thread

    @property
    def completed(self) -> bool:
        """Whether every rank has completed its last step. Later errors are the script's own."""
        return self.machine.state is WorkerState.COMPLETE

    # ---- the training thread ----------------------------------------------------------------------------------------

    def move(self, event: StepEvent) -> None:
        """Moves this rank along in its step and shows it on the tag page."""
        self.machine.steps.advance(event)
        self.show()

    def begin_attempt(self) -> None:
        """Forgets the updates of the last step, when a step is yielded."""
        self.attempting, self._update, self._update_raised = True, None, False

    def begin_update(self, call: FrameType) -> None:
        """Records that a protected optimizer begins its ``step()``, after the gradient barrier.

        Args:
            call: frame of this call. A nested call, such as the base class's ``step()``, is a part of the outer one.
        """
        if self._update is not None and _is_inside(call, self._update):
            return
        self._look_for_raised_update()
        self._update, self.updates_alone = call, True

    def end_update(self, call: FrameType) -> None:
        """Records the end of the call of ``step()`` with this frame."""
        if call is self._update:
            self._update = None

    def complete_step(self) -> None:
        """Records that the script has come to the end of the step."""
        self._look_for_raised_update()
        self.move(StepEvent.STEP_COMPLETED)
        self._has_completed_step = True

    def _look_for_raised_update(self) -> None:
        """Finds a ``step()`` that has begun and not ended: it has raised, and the script went on, perhaps skipping it.

        Torch reports only the beginning and a successful end. The copy counts as partially updated until the script
        asks for the next step, where `judge_copy` decides.
        """
        if self._update is not None:
            self._update, self._update_raised = None, True
            self.machine.lost_value()

    def show(self) -> None:
        """Writes this rank's tag to the tag page."""
        steps = self.machine.steps
        self.page.write(self.machine.generation, steps.step, steps.phase)
        self.observe(str(steps.phase))

    def show_moment(self, moment: SnapshotMoment, step: int, num_bytes: int, at_ns: int) -> None:
        """Writes a moment of one of this rank's snapshots to the tag page, for observers."""
        self.page.moment(moment, self.machine.generation, step, num_bytes, at_ns)

    def join(self) -> None:
        """Asks for a rank and connects the groups, which must exist already; a spare does not wait."""
        match self.next_move():
            case moves.Build():
                pass
            case moves.SaveAndEnd() as move:
                self.end(move.order, None, "it has not come to its first step")
            case move:
                raise InternalError(f"worker {self.link.worker} has joined and is to {move}")

    def next_move(self) -> Work:
        """Returns the caller's next move. Until then, sends reports, waits for orders and connects groups."""
        while True:
            move, num_orders = self._ask()
            match move:
                case moves.SendReport():
                    self.link.send(move.report)
                    if isinstance(move.report, WorkerReady):
                        self.observe("ready")
                case moves.Wait():
                    self._await_order(num_orders)
                case moves.Connect():
                    self._connect(move.generation)
                case _:
                    return move

    def _ask(self) -> tuple[moves.Move, int]:
        """Returns the machine's next move, and the number of orders received by then."""
        may_look = True
        while True:
            with self._news:
                if not (may_look and self.machine.owes_safe_point):
                    return self.machine.next_move(), self._num_orders
            may_look = False
            self.machine.holds(self.snapshots(), self.second_copies())

    def _await_order(self, num_orders: int) -> None:
        """Waits until more orders than ``num_orders`` have come.

        Raises:
            PeerLost: no order came in time.
        """
        self.page.set_waiting(True)
        try:
            with self._news:
                came = self._news.wait_for(lambda: self._num_orders > num_orders, ORDER_DEADLINE_S)
        finally:
            self.page.set_waiting(False)
        if not came:
            raise PeerLost(f"worker {self.link.worker}: no order from the controller within {ORDER_DEADLINE_S:g} s")

    def _connect(self, generation: int) -> None:
        """Connects all groups in ``generation``, together with the other ranks."""
        assert self.groups is not None
        assert self.machine.rank is not None
        self._adopt_rank()
        self.groups.drain()
        with self._breaking, self._news:
            self._groups_of = generation
        self.observe("reset")
        self.page.set_waiting(True)
        try:
            self.groups.connect(generation, self.machine.rank, self.machine.replaced)
        except (RuntimeError, PeerLost) as error:
            self.fell_out("connect", error)
            return
        finally:
            self.page.set_waiting(False)
        self.machine.connected()
        self.page.reset_operations()
        self.show()
        if self.machine.is_over(generation):
            self._break(generation)  # the listener handled the order before there were connections to close

    def stand_until_ended(self) -> NoReturn:
        """Ends the process, with all others, by the controller's order: a rank was lost before the first step.

        Raises:
            PeerLost: the order did not come within an hour.
        """
        self.machine.echoed()
        self.machine.built("0", (), checkpointing=False, timeout_s=self.longest_timeout_s)
        match self.next_move():
            case moves.SaveAndEnd() as move:
                self.end(move.order, None, "it has not come to its first step")
            case move:
                raise InternalError(f"worker {self.link.worker} is to be ended in its start-up, and is to {move}")

    def fell_out(self, where: str, error: Exception) -> None:
        """Breaks off a recovery: closes the groups, and reports the error unless the controller knows of it."""
        self._break(self._groups_of)
        self.machine.fell_out(where, text(error))

    def refused(self, error: StateMismatch) -> None:
        """Breaks off a recovery whose state was loaded, and does not equal what was loaded."""
        self._break(self._groups_of)
        self.machine.refused(text(error))

    def end(self, order: Rescue, path: str | None, problem: str | None) -> NoReturn:
        """Reports what was saved of this rank's state, and ends the process, because the job cannot continue."""
        self.link.send(StateRescued(self.link.worker, path, problem))
        print(f"keepstep: rank {self.machine.rank} ends: {order.reason}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_TOO_FEW_RANKS)


def _is_inside(call: FrameType, other: FrameType) -> bool:
    """Whether one call was made, directly or not, by another that is still running."""
    frame: FrameType | None = call
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None
