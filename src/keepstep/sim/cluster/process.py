"""A simulated process as seen by its node, the kernel, other ranks and the oracle."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from keepstep.protocol import messages as msg
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.node.effects import Spawn
from keepstep.protocol.node.liveness import Observation, was_passed
from keepstep.protocol.phases import Phase
from keepstep.protocol.waiting.operations import OperationCount
from keepstep.protocol.worker import WorkerMachine, WorkerState
from keepstep.sim.cluster.collectives import Key
from keepstep.sim.cluster.groups.registry import SimulatedGroups
from keepstep.sim.cluster.layout import SimulatedDurations
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.snapshots import SimulatedMemory, SimulatedSnapshots, Snapshot
from keepstep.sim.cluster.values import History, LocalValue, Rows

if TYPE_CHECKING:
    from keepstep.sim.world import World

Arguments = TypeVarTuple("Arguments")
Self = TypeVar("Self", bound="SimulatedProcess")


class Host(Protocol):
    """The interface of a node that its processes use."""

    name: str
    is_up: bool

    @property
    def is_read(self) -> bool:
        """Whether a process can read the snapshots in its memory."""

    @property
    def clock_s(self) -> float:
        """The time of the node's own clock."""

    def memory_of(self, number: int) -> SimulatedMemory | None:
        """Returns the memory with the snapshots of a worker."""

    def worker_says(self, number: int, report: msg.AnyMessage) -> None:
        """Sends a report of a worker to its agent."""


def held_while_stopped(method: Callable[[Self, *Arguments], None]) -> Callable[[Self, *Arguments], None]:
    """Decorates an event of a process: a stopped process handles it when it is continued, a dead one never."""

    @functools.wraps(method)
    def happens(self: Self, *arguments: *Arguments) -> None:
        if self.is_stopped:
            self.missed.append((happens, arguments))
        elif self.is_alive:
            method(self, *arguments)

    return happens


class SimulatedProcess(ABC):
    """A worker's process, without the training that runs in it (`SimulatedWorker`)."""

    def __init__(self, world: World, node: Host, process: int, wanted: Spawn) -> None:
        self.world = world
        self.node = node
        self.process = process
        self.number = wanted.worker
        self.machine = WorkerMachine(wanted.worker, process, wanted.rank)
        self.is_in_doubt = False
        """Whether its copy is wrong by nothing but what the script has decided by a value that was cut off."""
        self.device = wanted.device
        self.local_rank = wanted.local_rank
        self.local_world_size = wanted.local_world_size
        self.is_first_holder = wanted.rank is not None
        """Whether its script starts as a rank, together with those of all ranks, and not alone as a replacement's."""
        self.spawned_s = world.schedule.now_s
        self.is_alive = True
        self.died_s = math.inf
        self.is_stopped = False
        """Whether SIGSTOP has stopped it."""
        self.suspended_until_s = 0.0
        """The end of a suspension of all ranks."""
        self.is_stuck = False
        """Whether its training thread hangs. Its listener thread still runs."""
        self.slowness = 1.0
        self.exit: tuple[Cause, str] = (Cause.EXIT, "")
        self.missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Events that came while it was stopped."""
        self.parameters: History = ()
        self.local = LocalValue()
        self.memory = SimulatedMemory()
        """The memory of its snapshots. The node keeps it when the process ends."""
        self.snapshots = SimulatedSnapshots(
            self.memory, world.layout.snapshot_every, lambda moment, step: world.moment_shown(self, moment, step)
        )
        self.shard: str | None = None
        """The shard of the parameters; None for a spare."""
        self.cohort: int | None = None
        """The number of its latest cohort."""
        self.tag = Tag(0, -1, Phase.STARTING)
        self._tag_since_s = 0.0
        self._passed: list[tuple[Phase, float, float]] = []
        self.groups = SimulatedGroups(world, self)
        """The world, and the groups of its mesh."""
        self.in_collective: Key | None = None
        self.entered_s = 0.0
        """When it last began a collective; 0: never."""
        self._progress = 0
        self._is_waiting = False

    def __str__(self) -> str:
        rank = "spare" if self.machine.rank is None else f"rank {self.machine.rank}"
        return f"{rank} (worker {self.number})"

    @property
    def rank(self) -> int:
        """The rank that it holds."""
        assert self.machine.rank is not None
        return self.machine.rank

    @property
    def place(self) -> str:
        """The name of its node."""
        return self.node.name

    @property
    def step(self) -> int:
        """The step that it is in."""
        return self.machine.steps.step

    @property
    def where(self) -> str:
        """Its phase and step, or its state, for the trace."""
        state, steps = self.machine.state, self.machine.steps
        return f"{steps.phase} of step {steps.step}" if state is WorkerState.TRAINING else str(state)

    # ---- what its agent reads ---------------------------------------------------------------------------------------

    def look(self) -> Observation:
        """Returns what its agent observes."""
        in_collective = self.in_collective is not None
        return Observation(self.tag, self._progress, self._is_waiting, in_collective, self.is_stopped, False)

    def take_passed(self) -> list[tuple[Phase, float, float]]:
        """Returns (phase, begin, end) of the phases that have ended since the last call, as the page's ring shows."""
        passed, self._passed = self._passed, []
        return passed

    def counts(self) -> tuple[OperationCount, ...]:
        """Returns the page's counts of the group that it waits in. All operations of the world count as barriers."""
        count = self.groups.count() if self.in_collective is not None else None
        return () if count is None else (count,)

    def _show(self) -> None:
        """Writes the training thread's step and phase to the tag page."""
        machine = self.machine
        self._is_waiting = False
        before, self.tag = self.tag, Tag(machine.generation, machine.steps.step, machine.steps.phase)
        if self.tag != before:
            if was_passed(before, self.tag):
                self._passed.append((before.phase, self._tag_since_s, self.node.clock_s))
            self._tag_since_s = self.node.clock_s
        self.world.tag_shown(self)

    # ---- what happens to it -----------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Continues a stopped process, unless it is suspended. It handles the events that it has missed."""
        if self.world.schedule.now_s < self.suspended_until_s:
            return
        self.is_stopped = False
        missed, self.missed = self.missed, []
        for happens, arguments in missed:
            happens(self, *arguments)

    def put_down(self) -> None:
        """Kills a process that is still silent, as an operator would."""
        if self.is_alive and (self.is_stopped or self.is_stuck):
            self.world.oracle.silence.put_down(self)
            self.die(Cause.SIGNAL, "killed by SIGKILL")

    def be_fast(self) -> None:
        """Ends the slowness of the process."""
        self.slowness = 1.0

    def die(self, cause: Cause, detail: str) -> None:
        """Ends the process, even in the middle of a step."""
        if not self.is_alive:
            return
        self.is_alive, self.died_s = False, self.world.schedule.now_s
        self.exit = (cause, detail)
        self._leave_groups()
        self.world.oracle.groups.died(self.process)
        self.world.process_ended(self)

    def raise_error(self, error: str, *, fatal: bool = False) -> None:
        """Ends the process with an exception of its script, which it reports first."""
        self._say(msg.WorkerFailed(self.number, error, "Traceback ...", fatal))
        self.die(Cause.EXIT, "exit code 1")

    def has_written(self, step: int) -> None:
        """Reports a checkpoint that this process has completed."""
        self._say(msg.CheckpointWritten(self.number, step))

    def repeat_report(self, report: msg.WorkerReport) -> None:
        """Sends a report outside of the normal sequence, for example one of an earlier generation."""
        if self.is_alive and not self.is_stopped:
            self._say(report)

    @held_while_stopped
    def is_answered(self, answer: msg.StoreAnswered) -> None:
        """Receives an answer of the controller's start-up record."""
        if not self.is_stuck:
            self.world.start_up.heard(self.process, answer)

    # ---- its snapshots ----------------------------------------------------------------------------------------------

    def second_copies(self) -> msg.SnapshotsByRank:
        """Returns the snapshots of other ranks in its memory."""
        return tuple((rank, steps) for rank, steps in self.memory.by_rank() if rank != self.machine.rank)

    def take_snapshot(self, step: int, *, is_compared: bool) -> None:
        """Begins the snapshot of a step that is yielded, if one is due; see `SimulatedSnapshots.hand_out`."""
        assert self.machine.rank is not None
        snapshot = Snapshot(self.machine.rank, step, self.shard, self.parameters, self.local.rows)
        before = self.memory.whole
        if (copy := self.snapshots.hand_out(snapshot, is_compared=is_compared)) is not None:
            self.world.oracle.snapshots.written_over(self, before)
            self._after(self.world.draw(self._durations.snapshot_s), "copied", copy)
        elif (held := self.memory.find(snapshot.rank, step)) is not None:
            self.world.second_copies.send(self, held)

    @held_while_stopped
    def copied(self, copy: int) -> None:
        """Handles the end of a copy by the snapshot thread."""
        self.sealed(self.snapshots.copied(copy))

    def sealed(self, snapshot: Snapshot | None) -> None:
        """Handles a snapshot that can be loaded from now on, if there is one."""
        if snapshot is not None:
            self.world.oracle.snapshots.taken(self, snapshot)
            self.world.second_copies.send(self, snapshot)
            self._is_copied()

    @held_while_stopped
    def second_copy_there(self, snapshot: Snapshot) -> None:
        """Handles the completion of a second copy."""
        if self.snapshots.doubled(snapshot.step):
            self._is_copied()

    def rewind(self, step: int) -> tuple[Rows, bool]:
        """Loads the snapshot or checkpoint of a step. Returns its table of rows, and whether it is a checkpoint."""
        shard = self.shard = self.world.shard_of(self.machine.rank)
        if (snapshot := self.snapshots.load(self.machine.rank or 0, step)) is not None:
            self.shard, self.parameters = snapshot.shard, snapshot.parameters
            return snapshot.rows, False
        self.parameters, rows = self.world.read_checkpoint(shard, step)
        return rows, True

    @abstractmethod
    def _is_copied(self) -> None:
        """Handles the completion of a copy, its own or the buddy's."""

    # ---- what other parts tell the script ---------------------------------------------------------------------------

    @abstractmethod
    def order(self, order: msg.WorkerOrder) -> None:
        """Receives an order of the controller."""

    @abstractmethod
    def has_exchanged(self) -> None:
        """Handles the end of the start-up exchange."""

    @abstractmethod
    def wait_in(self, key: Key) -> None:
        """Makes its training thread wait in a collective."""

    @abstractmethod
    def collective_ended(self, key: Key, rows: Rows) -> None:
        """Handles the end of a collective: all parts have arrived."""

    @abstractmethod
    def received(self, parameters: History, shard: str | None, rows: Rows) -> None:
        """Handles the arrival of a transfer's last bucket."""

    @abstractmethod
    def lose_connection(self) -> None:
        """Loses a connection to a peer, without a fault of any process."""

    @abstractmethod
    def lose_group(self) -> None:
        """Reports the failure of a group that the script itself has made. No step waits in it."""

    @abstractmethod
    def sent(self) -> None:
        """Handles the end of a transfer at its source: the receivers have all buckets."""

    # ---- for subclasses ---------------------------------------------------------------------------------------------

    def _leave_groups(self) -> None:
        """Ends all connections to other ranks."""
        self.groups.take_down()
        self.world.collectives.leave(self.process)
        self.world.rendezvous.leave(self.process)
        self.world.transfers.leave(self.process)

    def _after(self, delay_s: float, what: str, *arguments: object) -> None:
        self.world.schedule.after(delay_s, Event(f"worker {self.process}", what, arguments))

    @property
    def _durations(self) -> SimulatedDurations:
        return self.world.layout.durations

    def _say(self, report: msg.WorkerReport) -> None:
        self.node.worker_says(self.number, report)
