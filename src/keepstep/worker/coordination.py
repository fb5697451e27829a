"""The shell around the worker's machine: its threads, communicators, tag page, and link to the agent.

Two threads use it. The link's listener (and gloo's threads, when a collective fails) call `on_order` and `failed`: they
pass the event to the machine, which sets a flag, and close the groups. The training thread checks the flag at its safe
points and asks `next_move` for its next move; no other thread touches parameters.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from keepstep.cancel import CancelToken
from keepstep.config import adopt_rank
from keepstep.errors import InternalError, PeerLost
from keepstep.protocol import moves
from keepstep.protocol.messages import (
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
from keepstep.shared.tagpage import SnapshotMoment, TagWriter
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.link import Link
from keepstep.worker.values.missing import MissingValues, line_of_script

ORDER_DEADLINE_S = 3600.0
"""The controller has deadlines of its own for everything it waits for; this one only ends a wait on a lost one."""
SETTLE_S = 0.25
"""How long a backward may go on whose step a lost rank was synced in. It ends in milliseconds: what it still waits for
was sent before. Only after another loss does it wait for nothing."""
SIGN_OF_LIFE_S = 0.1
"""Between two signs of life of a rank that will go on by itself; less than any deadline of a phase."""

Work: TypeAlias = (
    moves.Build | moves.Undo | moves.Update | moves.Load | moves.Train | moves.Save | moves.End | moves.SaveAndEnd
)
"""A move that is not done here: it concerns the script or the state."""


class Coordination:
    """One rank's part in its job. Implements `keepstep.worker.groups.observer.GroupObserver`.

    What other threads tell the machine, and what it decides upon that, happens under one lock, which is never held
    while anything is waited for, broken or sent. How its moves went is told by the training thread alone, without it,
    and fields are read without it.
    """

    def __init__(self, link: Link, page: TagWriter, pid: int, rank: int | None) -> None:
        self.link = link
        self.page = page
        self.machine = WorkerMachine(link.worker, pid, rank)
        self.groups: GroupRegistry | None = None
        self.observe: Callable[[str], None] = lambda moment: None
        """Told of each moment of a recovery; the drill listens."""
        self.snapshots: Callable[[], tuple[int, ...]] = lambda: ()
        """Steps of the checkpoints that this rank can read now; asked by the training thread."""
        self.second_copies: Callable[[], SnapshotsByRank] = tuple
        """What this worker keeps of other ranks' snapshots; asked likewise."""
        self.digests: Callable[[], dict[str, str]] = dict
        """Digests of all protected state by name; the drill asks, in the training thread."""
        self.broken = CancelToken()
        """Set, by any thread, after the communicators were broken; ends what waits for other ranks besides them."""
        self.break_off: Callable[[], None] = lambda: None
        """Told by any thread that a rank was lost, with the communicators: what else waits for other ranks ends."""
        self.break_wait: Callable[[], None] = lambda: None
        """Told likewise: the training thread may wait on a key of the store."""
        self.follow: Callable[[WorkerOrder], None] = lambda order: None
        """Told of every order, in the listener's thread."""
        self._was_spare = rank is None
        """Whether the environment tells of no rank yet."""
        self.attempting = False
        """Whether a step was handed out and is not complete: what the script does is undone if it is interrupted."""
        self.is_warming_up = False
        """Whether this is a spare that computes only to warm up."""
        self.leaves_between_steps = False
        """Whether the loop leaves what it does where a step was handed out and is not begun, and does it again."""
        self._update: FrameType | None = None
        """The call of a protected optimizer's ``step()`` that is running, or has left with an exception."""
        self.updates_alone = True
        """False after a collective in there."""
        self.reduced_behind_update = False
        """Whether a backward has communicated since the last gradient barrier was left."""
        self._update_raised = False
        """Whether one has raised in this step, and the script went on: its parameters may be half updated."""
        self.missing_values = MissingValues()
        self._training_thread = threading.get_ident()
        self._warned: set[str] = set()
        self._news = threading.Condition()
        """Guards the machine, and is notified of all that the training thread may be waiting for."""
        self._num_orders = 0

    # ---- other threads --------------------------------------------------------------------------------------------

    def on_order(self, order: WorkerOrder) -> None:
        """What cannot wait for the training thread. Runs in the listener."""
        if isinstance(order, Terminate) and not callable(signal.getsignal(signal.SIGTERM)):
            return  # a script that does not handle the signal must not go on after its loop: it would seem complete
        with self._news:
            urgency = self.machine.receive(order)
            holding = self.machine.holding()
            self._num_orders += 1
            self._news.notify_all()
        if holding is not None:
            self.link.send(holding)
        self.follow(order)
        if urgency is Urgency.BREAK:
            self._break()
        if isinstance(order, Stop):
            if urgency is Urgency.SETTLE:
                timer = threading.Timer(SETTLE_S, self.settled, [order.generation])
                timer.daemon = True
                timer.start()
            self.observe("stop")

    def settled(self, generation: int | None = None) -> None:
        """The backward has ended, or has had its time (for the `Stop` of ``generation``): now everything is broken."""
        with self._news:
            urgency = self.machine.settled(generation)
            self._news.notify_all()
        if urgency is Urgency.BREAK:
            self._break()

    def _break(self) -> None:
        if self.groups is not None:
            self.groups.take_down()
        self.link.fail_requests()
        self.broken.set()
        self.break_off()
        self.break_wait()

    def entered(self, group: str, operation: Operation, peer: int) -> None:
        """An operation of a group was begun."""
        self.page.operation_entered(group, operation, peer)
        if self.machine.steps.phase is Phase.OPTIMIZER:
            self.machine.communicates_in_update = True
            if self._update is not None and self.is_training_thread:
                self.updates_alone = False
            elif torch._C._current_graph_task_id() != -1:
                self.reduced_behind_update = True

    def awaited(self) -> None:
        """Something waits for an operation in flight."""
        self.page.operation_awaited()

    def left(self, group: str, operation: Operation, peer: int, *, was_awaited: bool) -> None:
        """An operation of a group has ended."""
        self.page.operation_left(group, operation, peer, was_awaited=was_awaited)

    def failed(self, group: str, error: Exception) -> bool:
        """A collective ended in an error: echo, report it once, stop at the next safe point."""
        if self.completed:
            return False
        with self._news:  # both at once: no `Stop` may begin to settle between them
            urgency = self.machine.settled()
            hint = self.machine.collective_failed(group, text(error))
            self._news.notify_all()
        if urgency is Urgency.BREAK or hint is not None:
            self._break()
        if hint is not None:
            self.link.send(hint)
        return True

    def is_over(self, generation: int) -> bool:
        """Whether a newer generation has begun: groups that are being connected must be broken."""
        return self.machine.is_over(generation)

    def knows_failure(self, within_s: float) -> bool:
        """Whether a failure is known by which this rank is interrupted, now or ``within_s`` seconds.

        Meanwhile it does not count as a rank that waits for others: where all do, past their deadline, the job has
        stalled, and this one will go on by itself.
        """
        until_s = time.monotonic() + within_s
        with self._news:
            while not (self.interrupted or self.completed) and (left_s := until_s - time.monotonic()) > 0.0:
                self.page.progress()
                self._news.wait(min(left_s, SIGN_OF_LIFE_S))
        return self.interrupted

    def echoed(self, group: str) -> None:
        """A collective was answered by echo."""
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
        """Whether what the script does now is not undone: it is after the gradient barrier, or after the step."""
        phase = self.machine.steps.phase
        return phase is Phase.OPTIMIZER or (
            phase is Phase.UPDATED and self.machine.state is WorkerState.TRAINING and not self.attempting
        )

    def missing(self, group: str, received: Sequence[object]) -> None:
        """The script is about to get what a collective that was cut off has left. From the thread that gets it."""
        if self.machine.in_doubt and self.is_training_thread:
            tensors = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
            self.missing_values.adopt(tensors, in_update=self._update is not None)
            if self._update is not None:
                return  # it has many collectives, and `judge_copy` tells of them
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: a failure cut off a collective "
                f"of group {group}; what it would have given is missing, at {line_of_script()}",
                file=sys.stderr,
            )

    def judge_copy(self, host: Callable[[], object]) -> None:
        """The script asks for the next step: is this rank's copy whole, after collectives that were cut off?

        Args:
            host: gives the protected host values.
        """
        harm = self.missing_values.conclude(host)
        if self._update_raised and self.interrupted:
            self.machine.found_partially_updated()
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: optimizer.step() has raised, and "
                "a rank was lost in the same step; this rank's copy may be half updated and has to be restored",
                file=sys.stderr,
            )
        elif self.machine.in_doubt and harm is None:
            self.machine.found_whole()
        elif self.machine.in_doubt:
            self.machine.found_partially_updated()
            print(
                f"keepstep: rank {self.machine.rank}, step {self.machine.steps.step}: the value that a failure cut off "
                f"may have got into {harm}; this rank's copy has to be restored. Before optimizer.step() such a "
                "collective does no harm",
                file=sys.stderr,
            )

    def await_rank(self) -> int:
        """This process's rank; a spare waits until it is given one.

        While it warms up it takes itself for rank 0: torch's compiler asks for the rank, to name what it logs.
        """
        machine = self.machine
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
        """The environment follows the rank. By the training thread: no other one may change it under its hands."""
        if self._was_spare and (mine := self.machine.assignment) is not None:
            self._was_spare = False
            adopt_rank(mine.rank, mine.local_rank, mine.local_world_size)

    def ask_once(self, operation: str, name: str) -> bool:
        """Asks for what happens once in the job's life; waiting for another process to do it is no hang."""
        self.page.set_waiting(True)
        try:
            return self.link.ask_once(operation, name, ORDER_DEADLINE_S)
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
        """Whether the training thread shall come to a safe point. Cheap: it is asked many times in a step."""
        return self.machine.interrupted

    @property
    def phase(self) -> Phase:
        """Where in a step this rank is."""
        return self.machine.steps.phase

    @property
    def is_training_thread(self) -> bool:
        """Whether it is the training thread that asks."""
        return threading.get_ident() == self._training_thread

    @property
    def completed(self) -> bool:
        """Whether every rank has completed its last step: from here on the script's errors are its own."""
        return self.machine.state is WorkerState.COMPLETE

    # ---- the training thread ----------------------------------------------------------------------------------------

    def move(self, event: StepEvent) -> None:
        """Moves this rank along in its step and shows it on the tag page."""
        self.machine.steps.advance(event)
        self.show()

    def begin_attempt(self) -> None:
        """A step is handed out: what optimizers did in the step before is its own."""
        self.attempting, self._update, self._update_raised = True, None, False

    def begin_update(self, call: FrameType) -> None:
        """A protected optimizer begins its ``step()``, after the gradient barrier.

        Args:
            call: the frame of this call. One inside of another, as of the base class's ``step()``, is a part of that.
        """
        if self._update is not None and _is_inside(call, self._update):
            return
        self._look_for_raised_update()
        self._update, self.updates_alone = call, True

    def end_update(self, call: FrameType) -> None:
        """The call of ``step()`` with this frame has come to its end."""
        if call is self._update:
            self._update = None

    def complete_step(self) -> None:
        """The script has come to the end of the step."""
        self._look_for_raised_update()
        self.move(StepEvent.STEP_COMPLETED)

    def _look_for_raised_update(self) -> None:
        """A ``step()`` that has begun and not ended has raised, and the script went on (it skips the step, perhaps).

        Torch tells of the beginning and of a good end only. The copy counts as partially updated until the script asks
        for the next step, where `judge_copy` decides.
        """
        if self._update is not None:
            self._update, self._update_raised = None, True
            self.machine.lost_value()

    def show(self) -> None:
        """Writes the tag."""
        steps = self.machine.steps
        self.page.write(self.machine.generation, steps.step, steps.phase)
        self.observe(str(steps.phase))

    def show_moment(self, moment: SnapshotMoment, step: int, num_bytes: int, at_ns: int) -> None:
        """Writes what became of a snapshot of this rank, for the eye."""
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
        """The caller's next move. Sends reports, waits for orders and connects groups by itself until then."""
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
        """The machine's next move, and how many orders had come by then."""
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
            PeerLost: none came in time.
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
            self._break()  # the order came after its listener had nothing to break

    def give_up_update(self) -> None:
        """The rest of a step cannot be done: this rank's copy is between two steps, and has to be restored."""
        self.machine.lost_value()
        self.machine.found_partially_updated()
        self._update = None

    def stand_until_ended(self) -> NoReturn:
        """A rank was lost while all start, and the script can get no further: its process is ended, with all others.

        Raises:
            PeerLost: it was not, within an hour.
        """
        self.machine.echoed()
        self.machine.built("0", (), checkpointing=False)
        match self.next_move():
            case moves.SaveAndEnd() as move:
                self.end(move.order, None, "it has not come to its first step")
            case move:
                raise InternalError(f"worker {self.link.worker} is to be ended in its start-up, and is to {move}")

    def fell_out(self, where: str, error: Exception) -> None:
        """Breaks off a recovery: tells the controller, unless it knows."""
        self._break()
        self.machine.fell_out(where, text(error))

    def end(self, order: Rescue, path: str | None, problem: str | None) -> NoReturn:
        """Reports what was saved of this rank's state, and ends the process: the job cannot continue."""
        self.link.send(StateRescued(self.link.worker, path, problem))
        print(f"keepstep: rank {self.machine.rank} ends: {order.reason}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_TOO_FEW_RANKS)


def _is_inside(call: FrameType, other: FrameType) -> bool:
    """Whether one call was made, directly or not, by another that is still running."""
    frame: FrameType | None = call
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None
