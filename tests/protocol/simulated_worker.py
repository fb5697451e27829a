"""One worker of a simulated job: what its process knows, and what it may say in truth."""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from keepstep.protocol import resume
from keepstep.protocol.messages import Abandon, AnyMessage, Assign, Complete, Recover, Rescue, Resume, Stop, Transfer
from keepstep.protocol.phases import Phase
from keepstep.protocol.resume import Action

ORDER_IN_STEP = [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED]
Position = tuple[int, Phase]


class WorkerState(enum.Enum):
    """What a worker's training thread is at."""

    LAUNCHING = enum.auto()
    JOINING = enum.auto()
    CONNECTING = enum.auto()
    BUILDING = enum.auto()
    READY = enum.auto()
    STANDING = enum.auto()
    RESTORING = enum.auto()
    RESTORED = enum.auto()
    TRAINING = enum.auto()
    FINISHED = enum.auto()
    COMPLETE = enum.auto()


AWAITS_ORDERS = {
    WorkerState.JOINING,
    WorkerState.READY,
    WorkerState.STANDING,
    WorkerState.RESTORED,
    WorkerState.FINISHED,
}


@dataclasses.dataclass(slots=True)
class SimulatedWorker:
    """One process."""

    number: int
    node: str
    rank: int | None
    state: WorkerState = WorkerState.LAUNCHING
    step: int = -1
    phase: Phase = Phase.STARTING
    partially_updated: bool = False
    hung: bool = False
    dying: bool = False
    """It was ordered to be fenced, and its process still exists."""
    generation: int = 0
    """The generation whose groups it has connected."""
    target: int = 0
    """The generation whose groups it is connecting."""
    told: int = 0
    """The newest generation it was told to stop for."""
    reported: int = 0
    """The newest generation it reported a safe point for."""
    failed_in: int = 0
    observed_in: int = 0
    stopped_in: Position | None = None
    assignment: Assign | None = None
    said: tuple[tuple[int, ...], int | None, tuple[int, ...]] = ((), None, ())
    """What it last reported that its copy can be at, is at, and can be loaded from."""
    order: Recover | None = None
    resumed: int = 0
    completed: int = 0
    abandoned: bool = False
    rescue: bool = False
    orders: deque[AnyMessage] = dataclasses.field(default_factory=deque)

    @property
    def parameters_at(self) -> int | None:
        """The step of its parameters, None where they are in between or were never loaded."""
        if self.partially_updated or self.phase in (Phase.STARTING, Phase.OPTIMIZER):
            return None
        return self.step + 1 if self.phase is Phase.UPDATED else self.step

    def reach(self) -> tuple[int, ...]:
        """Where it can say in truth that its copy can be, standing at a safe point."""
        at = self.parameters_at
        if at is None:
            return ()
        return (at, at + 1) if self.phase is Phase.SYNCED else (at,)

    def place(self) -> tuple[int, int]:
        """How far it is, as a pair that can be compared."""
        return self.step, ORDER_IN_STEP.index(self.phase) if self.phase in ORDER_IN_STEP else -1

    @property
    def receives(self) -> Transfer | None:
        """The transfer that brings its shard, if there is one."""
        assert self.order is not None
        return next((each for each in self.order.transfers if self.rank in each.receivers), None)

    @property
    def action(self) -> Action:
        """How it gets to the resume step: it restores what is sent to it, and else knows from what it has reported."""
        assert self.order is not None
        if self.receives:
            return Action.RESTORE
        reach, at, snapshots = self.said
        action = resume.action(self.order.resume_step, frozenset(reach), at, frozenset(snapshots))
        assert action is not Action.RESTORE, f"{self.order} sends nothing to rank {self.rank}, which said {self.said}"
        return action

    def read(self, order: AnyMessage) -> None:
        """Takes one order from its link."""
        match order:
            case Assign():
                self.rank, self.assignment = order.rank, order
            case Stop():
                self.told = max(self.told, order.generation)
            case Recover():
                self.order = order
            case Resume():
                self.resumed = order.generation
            case Complete():
                self.completed = order.generation
            case Abandon():
                self.abandoned = True
            case Rescue():
                self.rescue = True
            case _:
                raise AssertionError(f"worker {self.number} was sent {order}")

    def begin(self) -> None:
        """Joins the generation that it was assigned to; where that is over, its start-up goes on in echo."""
        if self.assignment is None or self.told > self.assignment.generation:
            self.state = WorkerState.BUILDING
        else:
            self.connect(self.assignment.generation)

    def connect(self, generation: int) -> None:
        """Goes to the rendezvous of a generation."""
        self.target, self.state = generation, WorkerState.CONNECTING

    def stand(self) -> None:
        """Begins to wait for a decision; an unfinished step before the barrier is undone."""
        if self.phase in (Phase.FORWARD, Phase.BACKWARD):
            self.stopped_in = (self.step, self.phase)
            self.undo()
        self.reported, self.order, self.state = max(self.reported, self.generation), None, WorkerState.STANDING

    def undo(self) -> None:
        """Puts a step back whose update has not begun."""
        self.step, self.phase = self.step - 1, Phase.UPDATED
