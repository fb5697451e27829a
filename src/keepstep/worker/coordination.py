"""The training thread's side of the protocol: where it stands, whether it is to stop, and how it gets going again.

Two threads meet here. The link's listener (and gloo's threads, when a collective fails) call `on_order` and `failed`:
they break the communicators and raise a flag. The training thread looks at the flag at its safe points and carries
out the recovery itself; nobody else ever touches parameters.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from keepstep.errors import KeepstepError, PeerLost
from keepstep.protocol.messages import (
    Abandon,
    Assign,
    CollectiveFailed,
    Complete,
    GroupsReset,
    RankAwaited,
    Recover,
    Rescue,
    Resume,
    SafePointReached,
    Stop,
    WorkerJoined,
    WorkerOrder,
    text,
)
from keepstep.protocol.phases import Phase, StepEvent, StepMachine
from keepstep.protocol.resume import reach
from keepstep.tagpage import TagWriter
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.link import Link

ORDER_DEADLINE_S = 3600.0
"""The controller has deadlines of its own for everything it waits for; this one only ends a wait on a lost one."""
SETTLE_S = 0.25
"""How long a backward may go on whose step a lost rank was synced in. It ends in milliseconds: what it still waits for
was sent before. Only where another loss comes on top does it wait in vain."""


class StepInterrupted(BaseException):
    """Unwinds an interrupted step up to its ``with``; not an Exception, so that a script does not catch it."""


class Superseded(KeepstepError):
    """The generation ended while this rank was recovering in it."""


class Coordination:
    """One rank's view of its job. Implements `keepstep.worker.groups.group.GroupObserver`."""

    def __init__(self, link: Link, page: TagWriter, pid: int, rank: int | None) -> None:
        self.link = link
        self.page = page
        self.machine = StepMachine()
        self.groups: GroupRegistry | None = None
        self.generation = 0
        """The generation whose groups this rank has connected, 0 before the first."""
        self.rank: int | None = rank
        self.tainted = False
        """Something was echoed since the groups were last connected."""
        self.torn = False
        """The parameters are in between, and reach no step."""
        self.stopped_in: tuple[int, Phase] | None = None
        """Step and phase in which this rank was interrupted, until it is connected again."""
        self.completed = False
        self.observe: Callable[[str], None] = lambda moment: None
        """Told of each moment of a recovery; the drill listens."""
        self.on_rescue: Callable[[Rescue], None] = lambda order: None
        """Saves the shard and ends the process."""
        self._pid = pid
        self._assigned = threading.Event()
        self._assignment: Assign | None = None
        self._stop_generation = 0
        self._failed_generation = -1
        self._warned: set[str] = set()
        self._flag_lock = threading.Lock()
        self._settling: int | None = None
        """The generation of a `Stop` that waits for the end of the backward."""
        self._flagged = threading.Event()

    # ---- other threads --------------------------------------------------------------------------------------------

    def on_order(self, order: WorkerOrder) -> None:
        """What cannot wait for the training thread. Runs in the listener."""
        match order:
            case Assign():
                self._assignment, self.rank = order, order.rank
                self._assigned.set()
            case Stop():
                self._stop(order)
                self.observe("stop")
            case Abandon():
                self._break()
            case _:
                pass

    def _stop(self, order: Stop) -> None:
        machine = self.machine
        with self._flag_lock:
            settles = machine.phase is Phase.BACKWARD and machine.step == order.synced_step
            self._settling = order.generation if settles else None
            self._stop_generation = order.generation
        if not settles:
            self._break()
            return
        timer = threading.Timer(SETTLE_S, self.settled, [order.generation])
        timer.daemon = True
        timer.start()

    def settled(self, generation: int | None = None) -> None:
        """The backward has ended, or has had its time (for the `Stop` of ``generation``): now everything is broken."""
        with self._flag_lock:
            if self._settling is None or generation not in (None, self._settling):
                return
            self._settling = None
        self._break()

    def _break(self) -> None:
        self._flagged.set()
        if self.groups is not None:
            self.groups.take_down()
        self.link.fail_requests()

    def entered(self) -> None:
        """A collective was begun."""
        self.page.collective_entered()
        if self.machine.phase is Phase.OPTIMIZER:
            self._warn_once(
                "a collective runs after the gradient barrier, in the update of the step: if a rank fails just then, "
                "this rank's copy counts as torn and is restored from another one; move it before optimizer.step() "
                "or out of the step"
            )

    def left(self) -> None:
        """A collective has ended."""
        self.page.collective_left()

    def failed(self, group: str, error: Exception) -> bool:
        """A collective ended in an error: echo, report it once, stop at the next safe point."""
        if self.completed:
            return False
        self.settled()
        with self._flag_lock:
            first = self._failed_generation != self.generation and not self._stopping
            self._failed_generation = self.generation
        if first:
            self._break()
            self.link.send(CollectiveFailed(self.link.worker, self.generation, group, text(error)))
        return True

    def echoed(self, group: str) -> None:
        """A collective was answered by echo."""
        self.tainted = True
        if self.machine.phase is Phase.OPTIMIZER:
            self.torn = True
        if self.machine.phase is Phase.UPDATED and self.machine.step >= 0:
            self._warn_once(
                f"generation {self.generation}: a collective of group {group} outside of a step was cut off by a "
                "failure and holds this rank's own values only"
            )

    def await_rank(self) -> int:
        """This process's rank; a spare waits until it is given one."""
        if self.rank is None:
            self.link.send(RankAwaited(self.link.worker))
            self.page.set_waiting(True)
            self._assigned.wait()
            self.page.set_waiting(False)
        assert self.rank is not None
        return self.rank

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"keepstep: {what}", RuntimeWarning, stacklevel=4)

    # ---- the flag -------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return self._stop_generation > self.generation

    @property
    def target_generation(self) -> int:
        """The generation that this rank is in, or on its way to."""
        assigned = self._assignment.generation if self._assignment is not None else 0
        return max(assigned, self._stop_generation, self.generation)

    @property
    def interrupted(self) -> bool:
        """Whether the training thread shall come to a safe point. Cheap: it is asked many times in a step."""
        return (self._stopping and self._settling is None) or self._failed_generation == self.generation

    # ---- the training thread --------------------------------------------------------------------------------------

    def move(self, event: StepEvent) -> None:
        """Moves this rank's machine along and shows it on the tag page."""
        self.machine.advance(event)
        self.show()

    def show(self) -> None:
        """Writes the tag."""
        self.page.write(self.generation, self.machine.step, self.machine.phase)
        self.observe(str(self.machine.phase))

    def join(self) -> int:
        """Asks for a rank and connects the groups, which must exist already; a spare does not wait.

        Returns:
            the rank, provisional on a spare.
        """
        self.link.send(WorkerJoined(self.link.worker, self._pid))
        if self.rank is None:
            return 0
        order = self._await(Assign, Stop)
        try:
            if isinstance(order, Assign):
                self.connect(order.generation)
        except Superseded:
            pass
        if self.generation == 0:
            self.tainted = True  # the start-up goes on in echo and ends at the first step
        return self.rank

    def connect(self, generation: int) -> None:
        """Connects all groups in ``generation``, together with the other ranks.

        Raises:
            Superseded: the generation is over already, or a member did not come.
        """
        assert self.groups is not None
        assert self.rank is not None
        self.check_current(generation)
        self.groups.drain()
        self.observe("reset")
        self.page.set_waiting(True)
        try:
            self.groups.connect(generation, self.rank)
        except (RuntimeError, PeerLost) as error:
            raise self.lost_in(generation, "connect", error) from error
        finally:
            self.page.set_waiting(False)
        self.generation = generation
        self._flagged.clear()
        self.page.reset_collectives()
        self.tainted = False
        self.stopped_in = None
        self.show()
        if self._stopping:
            self._break()  # the order came after its listener had nothing to break
        self.check_current(generation)
        self.link.send(GroupsReset(self.link.worker, generation))

    def check_current(self, generation: int) -> None:
        """Raises:
        Superseded: a newer generation has begun.
        """
        if self._stop_generation > generation:
            raise Superseded(f"generation {generation} is over: {self._stop_generation} has begun")

    def lost_in(self, generation: int, where: str, error: Exception) -> Superseded:
        """Breaks off a recovery: tells the controller unless it knows, and returns what to raise."""
        self._break()
        if self._stop_generation <= generation:
            self.link.send(CollectiveFailed(self.link.worker, generation, where, text(error)))
        return Superseded(f"generation {generation}, {where}: {error}")

    def own_reach(self) -> tuple[int, ...]:
        """The steps this rank's copy can be at."""
        if self.torn:
            return ()
        return tuple(sorted(reach(self.machine.step, self.machine.phase)))

    def stand(self, snapshots: tuple[int, ...], after: int) -> Recover:
        """Reports the safe point for every `Stop` and returns the first decision that stands.

        Args:
            snapshots: steps of the checkpoints this rank can read.
            after: the generation that is over; a `Stop` of a later one is waited for.
        """
        self.page.set_waiting(True)
        reported = after
        try:
            while True:
                if self._stop_generation > reported:
                    reported = self._stop_generation
                    self._report_safe_point(reported, snapshots)
                order = self._await(Stop, Recover)
                if isinstance(order, Recover) and order.generation == self._stop_generation == reported:
                    return order
        finally:
            self.page.set_waiting(False)

    def _report_safe_point(self, generation: int, snapshots: tuple[int, ...]) -> None:
        machine = self.machine
        step, phase = self.stopped_in or (machine.step, machine.phase)
        current = None if self.torn else machine.parameters_at
        report = SafePointReached(self.link.worker, generation, step, phase, self.own_reach(), current, snapshots)
        self.link.send(report)

    def await_resume(self, generation: int) -> None:
        """Waits until all ranks stand at the resume step.

        Raises:
            Superseded: another failure came first.
        """
        order = self._await_or_stop(generation, Resume)
        if order is None:
            raise Superseded(f"generation {generation} ended before it was resumed")

    def await_completion(self) -> bool:
        """Waits until every rank has completed its last step. False: a failure came first."""
        self.completed = self._await_or_stop(self.generation, Complete) is not None
        return self.completed

    def await_decision(self) -> Recover | None:
        """The decision for a rank that stands ready; None if a failure came first."""
        order = self._await_or_stop(self.generation, Recover)
        assert order is None or isinstance(order, Recover)
        return order

    def _await_or_stop(self, generation: int, kind: type) -> WorkerOrder | None:
        """The next order of ``kind``; None as soon as a generation later than ``generation`` stops."""
        self.page.set_waiting(True)
        try:
            while self._stop_generation <= generation:
                order = self._await(kind, Stop)
                if isinstance(order, kind):
                    return order
            return None
        finally:
            self.page.set_waiting(False)

    def _await(self, *kinds: type) -> WorkerOrder:
        while True:
            order = self.link.next_order(ORDER_DEADLINE_S)
            if isinstance(order, Rescue):
                self.on_rescue(order)
            if isinstance(order, kinds):
                return order

    def wait_until_interrupted(self, timeout_s: float) -> None:
        """Blocks until a failure is known, or for ``timeout_s``; nobody takes it for a hang."""
        self.page.set_waiting(True)
        self._flagged.wait(timeout_s)
        self.page.set_waiting(False)
