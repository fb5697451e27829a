"""A simulated process as seen by its node, the kernel, other ranks and the oracle."""

from __future__ import annotations

import functools
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
    """What a process knows of the machine it runs on."""

    name: str
    is_up: bool
    has_room: bool

    @property
    def is_read(self) -> bool:
        """Whether a process can read what is in its memory."""

    @property
    def clock_s(self) -> float:
        """The time that the machine's own clock shows."""

    def memory_of(self, number: int) -> SimulatedMemory | None:
        """Where the snapshots of a worker are."""

    def worker_says(self, number: int, report: msg.AnyMessage) -> None:
        """A worker writes to its agent's socket."""


def held_while_stopped(method: Callable[[Self, *Arguments], None]) -> Callable[[Self, *Arguments], None]:
    """Marks what happens to a process: to one that is stopped when it is continued, and to a dead one never."""

    @functools.wraps(method)
    def happens(self: Self, *arguments: *Arguments) -> None:
        if self.is_stopped:
            self.missed.append((happens, arguments))
        elif self.is_alive:
            method(self, *arguments)

    return happens


class SimulatedProcess(ABC):
    """What a `SimulatedWorker` is as a process, without what runs in it."""

    def __init__(self, world: World, node: Host, process: int, wanted: Spawn) -> None:
        self.world = world
        self.node = node
        self.process = process
        self.number = wanted.worker
        self.machine = WorkerMachine(wanted.worker, process, wanted.rank)
        self.device = wanted.device
        self.local_rank = wanted.local_rank
        self.local_world_size = wanted.local_world_size
        self.is_first_holder = wanted.rank is not None
        """Its script starts as a rank of the job, together with all others; a replacement's starts alone."""
        self.spawned_s = world.schedule.now_s
        self.is_alive = True
        self.is_stopped = False
        """Held by SIGSTOP: nothing in it moves."""
        self.is_stuck = False
        """Its training thread hangs; its listener lives."""
        self.slowness = 1.0
        self.exit: tuple[Cause, str] = (Cause.EXIT, "")
        self.missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What came while it was stopped."""
        self.parameters: History = ()
        self.local = LocalValue()
        self.memory = SimulatedMemory()
        """Of its snapshots; its node holds it as well."""
        self.snapshots = SimulatedSnapshots(
            self.memory, world.layout.snapshot_every, lambda moment, step: world.moment_shown(self, moment, step)
        )
        self.shard: str | None = None
        """The shard that the parameters are of; a spare's are of none yet."""
        self.cohort: int | None = None
        """The number of the cohort that it has connected with last."""
        self.tag = Tag(0, -1, Phase.STARTING)
        self._tag_since_s = 0.0
        self._passed: list[tuple[Phase, float, float]] = []
        self.groups = SimulatedGroups(world, self)
        """The world's, and those of its mesh."""
        self.in_collective: Key | None = None
        self.entered_s = 0.0
        """When it had last begun a collective; 0: never."""
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
        """What it is at, for the story."""
        state, steps = self.machine.state, self.machine.steps
        return f"{steps.phase} of step {steps.step}" if state is WorkerState.TRAINING else str(state)

    # ---- what its agent looks at ------------------------------------------------------------------------------------

    def look(self) -> Observation:
        """What its agent sees of it."""
        in_collective = self.in_collective is not None
        return Observation(self.tag, self._progress, self._is_waiting, in_collective, self.is_stopped)

    def take_passed(self) -> list[tuple[Phase, float, float]]:
        """The phases that its ring shows to have ended since the last look: when they began, and ended."""
        passed, self._passed = self._passed, []
        return passed

    def counts(self) -> tuple[OperationCount, ...]:
        """What its page shows of the group that it waits in; all that the world does is a barrier there."""
        count = self.groups.count() if self.in_collective is not None else None
        return () if count is None else (count,)

    def _show(self) -> None:
        """Writes where the training thread is into the page."""
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
        """A stopped process is continued: what came meanwhile comes now."""
        self.is_stopped = False
        missed, self.missed = self.missed, []
        for happens, arguments in missed:
            happens(self, *arguments)

    def be_fast(self) -> None:
        """It is not slow any more."""
        self.slowness = 1.0

    def die(self, cause: Cause, detail: str) -> None:
        """The process ends, also in the middle of a step."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.exit = (cause, detail)
        self._leave_groups()
        self.world.oracle.groups.died(self.process)
        self.world.process_ended(self)

    def raise_error(self, error: str, *, fatal: bool = False) -> None:
        """Its script raises an exception and does not catch it."""
        self._say(msg.WorkerFailed(self.number, error, "Traceback ...", fatal))
        self.die(Cause.EXIT, "exit code 1")

    def repeat_report(self, report: msg.WorkerReport) -> None:
        """Something the process says by mistake, or a second time."""
        if self.is_alive and not self.is_stopped:
            self._say(report)

    @held_while_stopped
    def is_answered(self, answer: msg.StoreAnswered) -> None:
        """An answer of the controller's record of the start-up comes."""
        if not self.is_stuck:
            self.world.start_up.heard(self.process, answer)

    # ---- its snapshots ----------------------------------------------------------------------------------------------

    def second_copies(self) -> msg.SnapshotsByRank:
        """What it keeps of other ranks."""
        return tuple((rank, steps) for rank, steps in self.memory.by_rank() if rank != self.machine.rank)

    def take_snapshot(self, step: int) -> None:
        """A step is handed out: its snapshot begins, if one is due."""
        assert self.machine.rank is not None
        snapshot = Snapshot(self.machine.rank, step, self.shard, self.parameters, self.local.rows)
        before = self.memory.whole
        if (copy := self.snapshots.hand_out(snapshot)) is not None:
            self.world.oracle.snapshots.written_over(self, before)
            self._after(self.world.draw(self._durations.snapshot_s), "copied", copy)
        elif (held := self.memory.find(snapshot.rank, step)) is not None:
            self.world.second_copies.send(self, held)

    @held_while_stopped
    def copied(self, copy: int) -> None:
        """The thread of the snapshots is through with one."""
        if (snapshot := self.snapshots.copied(copy)) is not None:
            self.world.oracle.snapshots.taken(self, snapshot)
            self.world.second_copies.send(self, snapshot)
            self._is_copied()

    @held_while_stopped
    def second_copy_there(self, snapshot: Snapshot) -> None:
        """The buddy has all of a snapshot."""
        if self.snapshots.doubled(snapshot.step):
            self._is_copied()

    @held_while_stopped
    def second_copy_refused(self, snapshot: Snapshot) -> None:
        """The buddy's node has no room for a snapshot."""
        self.world.oracle.snapshots.refused(self, snapshot)
        if self.snapshots.refused(snapshot.step):
            self._is_copied()
        else:
            self.raise_error("ConfigurationError: no memory for second copies of snapshots", fatal=True)

    def rewind(self, step: int) -> tuple[Rows, bool]:
        """Goes back to its snapshot of a step, or to a checkpoint; the rows there, and whether it is a checkpoint."""
        shard = self.shard = self.world.shard_of(self.machine.rank)
        if (snapshot := self.snapshots.load(self.machine.rank or 0, step)) is not None:
            self.shard, self.parameters = snapshot.shard, snapshot.parameters
            return snapshot.rows, False
        self.parameters, rows = self.world.read_checkpoint(shard, step)
        return rows, True

    @abstractmethod
    def _is_copied(self) -> None:
        """A snapshot is whole, here or with the buddy."""

    # ---- what other parts tell the script ---------------------------------------------------------------------------

    @abstractmethod
    def order(self, order: msg.WorkerOrder) -> None:
        """An order of the controller comes out of its socket."""

    @abstractmethod
    def has_exchanged(self) -> None:
        """It has exchanged with the other ranks what a start-up exchanges."""

    @abstractmethod
    def wait_in(self, key: Key) -> None:
        """Its training thread waits in a collective from now on."""

    @abstractmethod
    def collective_ended(self, key: Key, rows: Rows) -> None:
        """Every rank's part of a collective has arrived."""

    @abstractmethod
    def received(self, parameters: History, shard: str | None, rows: Rows) -> None:
        """The last bucket of a transfer has arrived."""

    @abstractmethod
    def lose_connection(self) -> None:
        """A connection to a peer ends for no reason."""

    @abstractmethod
    def lose_group(self) -> None:
        """A group of the script's own fails, in which no step waits."""

    @abstractmethod
    def sent(self) -> None:
        """The last bucket of this source is with its receivers."""

    # ---- for what runs in it ----------------------------------------------------------------------------------------

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
