"""Explores all interleavings of a small job around one failure.

The job starts and completes a step in one fixed order. From there on any pending event may happen next: each message of
each connection (in the order of that connection), each phase that a rank computes, each end of a collective, and once
the death of a rank. Equal worlds are explored once. When training has resumed, the rest of the job has no interesting
choices and runs in one order to its end, where the oracle checks it a last time.

Jobs that have too many interleavings for that are explored with a bound on delays (Emmi, Qadeer and Rakamarić,
"Delay-bounded scheduling", POPL 2011): the oldest pending event happens next, and a bounded number of times a possible
event is delayed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from keepstep.errors import KeepstepError
from keepstep.protocol import messages as msg
from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.protocol.worker import WorkerState
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NetworkLayout, NodeLayout, SimulatedDurations
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.exhaustive.snapshot import Copier
from keepstep.sim.oracle import Check, ViolationError
from keepstep.sim.world import World

SOON_S = 0.04
"""An event that is due later is a deadline, which expires only when nothing else can happen."""
PATIENCE_S = 400.0
"""Limit in virtual time, longer than all deadlines of a recovery together."""
PATIENCE = 50_000
"""The same limit as a number of events."""
_INSTANT = SimulatedDurations(
    **{field.name: 0.001 for field in dataclasses.fields(SimulatedDurations) if field.name != "tick_s"}
)


class Untimed:
    """Replaces a `Schedule`: pending events without their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.pending: list[Event] = []
        self.deadlines: list[tuple[float, Event]] = []

    def after(self, delay_s: float, event: Event) -> None:
        """Adds an event. If its delay is at least `SOON_S`, it is a deadline."""
        if delay_s < SOON_S:
            self.pending.append(event)
        else:
            self.deadlines.append((self.now_s + delay_s, event))

    def at(self, at_s: float, event: Event) -> None:
        """Adds an event by its time."""
        self.after(at_s - self.now_s, event)

    def heads(self) -> Iterator[int]:
        """Yields the numbers of the events that may happen next: the first of each line."""
        lines = set()
        for number, event in enumerate(self.pending):
            line = _line(event)
            if line not in lines:
                lines.add(line)
                yield number

    def take(self, number: int) -> Event:
        """Removes a pending event, and returns it."""
        return self.pending.pop(number)

    def next_deadline(self) -> Event:
        """Advances the time to the next deadline, removes it, and returns its event."""
        self.deadlines.sort(key=lambda entry: entry[0])
        self.now_s, event = self.deadlines.pop(0)
        return event


def _line(event: Event) -> tuple[object, ...]:
    """Returns the line of an event. Events of one line keep their order."""
    match event.what:
        case "order" | "perform":
            return event.part, event.what
        case "worker_said":
            return event.part, event.what, event.arguments[1]
        case "arrive" if event.part == "network":
            return event.part, event.arguments[0], event.arguments[1]
        case _:
            return tuple(event)


class Tape:
    """Replaces a random generator: a sequence of answers to the yes-or-no questions of one event."""

    def __init__(self, answers: tuple[bool, ...]) -> None:
        self.answers = list(answers)
        self.asked = 0

    def random(self) -> float:
        """Returns the next answer, as a number for `World.coin`. Answers False beyond the end of the sequence."""
        if self.asked == len(self.answers):
            self.answers.append(False)
        self.asked += 1
        return 0.0 if self.answers[self.asked - 1] else 0.75

    def uniform(self, low: float, high: float) -> float:
        """Returns ``low``, because durations do not matter."""
        return low

    def next(self) -> tuple[bool, ...] | None:
        """Returns the next sequence of answers, in the order of binary numbers; None after the last."""
        answers = self.answers[: self.asked]
        while answers and answers[-1]:
            answers.pop()
        return (*answers[:-1], True) if answers else None


@dataclasses.dataclass(slots=True)
class Explored:
    """The result of an exploration."""

    num_states: int = 0
    num_transitions: int = 0
    num_ends: int = 0
    longest: int = 0
    """Number of events from the first choice to the end of the longest path."""
    violation: str | None = None
    path: tuple[str, ...] = ()


def small_job(world_size: int, snapshot_every: int = 0, num_shards: int | None = None) -> ClusterLayout:
    """Returns a job of two steps with one spare on one node. It has no quarantine, which takes two failures.

    Args:
        world_size: number of ranks.
        snapshot_every: steps from one snapshot to the next; 0: there are none.
        num_shards: number of shards. None: one per rank if there are snapshots, else one. With several shards and
            several replicas of each, the job has the groups of HSDP.
    """
    if num_shards is None:
        num_shards = world_size if snapshot_every else 1
    settings = dataclasses.replace(
        SETTINGS, world_size=world_size, num_spares=1, ranks_per_node=world_size, quarantine_failures=0
    )
    return ClusterLayout(
        (NodeLayout("node-0", world_size + 1, "rack-0"),),
        tuple(str(rank % num_shards) for rank in range(world_size)),
        settings,
        NetworkLayout(0.001, 0.001),
        _INSTANT,
        num_steps=2,
        snapshot_every=snapshot_every,
        has_mesh=1 < num_shards < world_size,
    )


class _UntimedWorld(World):
    """A world without random durations."""

    def draw(self, duration_s: float) -> float:
        return duration_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A world that the exploration has reached."""

    world: World
    path: tuple[str, ...]
    num_delays: int


class Explorer:
    """Explores one small job with the death of any of its ranks at any point of its second step."""

    def __init__(self, layout: ClusterLayout, max_delays: int | None = None) -> None:
        """Args:
        layout: the job.
        max_delays: how often an older pending event may be delayed for a newer one; None: no limit.
        """
        self.found = Explored()
        self._max_delays = math.inf if max_delays is None else max_delays
        self._copier = Copier({SimulatedWorker: _what_is_left})
        self._seen: dict[int, int] = {}
        """Fingerprint of a world -> the fewest delays that lead to it; 0 if they are not bounded."""
        self._start = _UntimedWorld(layout, seed=0)
        self._start.schedule = Untimed()  # type: ignore[assignment]  # the same methods, without times

    def explore(self, limit: int | None = None) -> Explored:
        """Explores all states, or about ``limit`` of them, and returns the result. Stops at the first violation."""
        world = self._start
        world.boot()
        self._run_in_order(world, lambda: self._has_begun_step(world, 1) and self._spare_is_warm(world))
        stack = [_Place(world, (), 0)]
        while stack and (limit is None or self.found.num_states < limit):
            for place in self._next(stack.pop()):
                if self._is_worth_exploring(place):
                    stack.append(place)
                if self.found.violation is not None:
                    self.found.path = place.path
                    return self.found
        return self.found

    # ---- one step of the exploration --------------------------------------------------------------------------------

    def _is_worth_exploring(self, place: _Place) -> bool:
        """Records a world, and returns whether its successors are unknown. Runs a world to its end if it is over."""
        self.found.num_transitions += 1
        mark = self._fingerprint(place.world)
        fewest = self._seen.get(mark)
        if self.found.violation is not None or (fewest is not None and fewest <= place.num_delays):
            return False
        self._seen[mark] = place.num_delays
        is_over = self._is_over(place.world)
        if fewest is None:
            self.found.num_states += 1
            self.found.longest = max(self.found.longest, len(place.path))
            if is_over:
                self._finish(place.world)
        return not is_over

    def _next(self, place: _Place) -> Iterator[_Place]:
        """Yields every next world that has a choice or is over."""
        for index, (kind, number) in enumerate(self._moves(place.world)):
            delays = 0 if kind == "kill" or self._max_delays == math.inf else index
            if place.num_delays + delays > self._max_delays:
                continue
            answers: tuple[bool, ...] | None = ()
            while answers is not None:
                copy = self._copier.copy(place.world)
                tape = Tape(answers)
                copy.rng = tape
                path = [self._perform(copy, kind, number)]
                while not self._is_over(copy) and len(moves := self._moves(copy)) == 1:
                    path.append(self._perform(copy, *moves[0]))
                    self._check_patience(copy, place.world.schedule.now_s, len(path))
                answers = tape.next()
                yield _Place(copy, (*place.path, *path), place.num_delays + delays)

    def _moves(self, world: World) -> list[tuple[str, int]]:
        """Returns the possible next moves: ("event", its number), ("deadline", 0) or ("kill", the process)."""
        untimed = _untimed(world)
        untimed.pending = [event for event in untimed.pending if not _is_stale(world, event)]
        heads = list(untimed.heads())
        quiet = _is_quiet(untimed.pending)
        alone = next((number for number in heads if _stands_alone(world, untimed.pending[number], quiet)), None)
        moves = [("event", number) for number in (heads if alone is None else [alone])]
        if not moves and untimed.deadlines:
            moves.append(("deadline", 0))
        if not world.oracle.num_failures:
            moves += [("kill", process) for process in self._victims(world)]
        return moves

    def _perform(self, world: World, kind: str, number: int) -> str:
        untimed = _untimed(world)
        if kind == "kill":
            victim = world.workers[number]
            world.oracle.suffers(victim, "kill")
            name = f"{victim} is killed in {victim.where}"
            victim.die(Cause.SIGNAL, "killed by SIGKILL")
            return name
        event = untimed.take(number) if kind == "event" else untimed.next_deadline()
        self._happen(world, event)
        self._let_controller_hear(world)
        self._acknowledge(world)
        return f"{event.part}: {event.what} {event.arguments}"

    def _let_controller_hear(self, world: World) -> None:
        """Delivers all packets to the controller at once.

        There is one line to the controller and one from it, and it does nothing between two packets. So a delay of a
        packet has the same effect as a delay of the answer, and the exploration delays the answers.
        """
        untimed = _untimed(world)
        while self.found.violation is None:
            upward = [number for number in untimed.heads() if _is_upward(untimed.pending[number])]
            if not upward:
                return
            self._happen(world, untimed.take(upward[0]))

    @staticmethod
    def _acknowledge(world: World) -> None:
        """Acknowledges all messages that have arrived. Without this, worlds would differ only in acknowledgements."""
        for name, connection in world.controller.machine.connections.items():
            channel = world.nodes[name].channel
            channel.heard(connection.channel.received, 0.0)
            connection.channel.heard(channel.received, 0.0)

    def _happen(self, world: World, event: Event) -> None:
        try:
            world.happen(event)
        except ViolationError as violation:
            self.found.violation = str(violation)
        except KeepstepError as error:
            self.found.violation = f"{Check.RAISED}: {error}"

    def _check_patience(self, world: World, since_s: float, num_events: int) -> None:
        """Records a violation if the world runs for too long without a choice or an end."""
        if world.schedule.now_s - since_s > PATIENCE_S or num_events > PATIENCE:
            stuck = ViolationError(Check.STUCK, "one thing follows from the other, and nothing comes of it")
            self.found.violation = str(stuck)

    @staticmethod
    def _victims(world: World) -> list[int]:
        in_step = (Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER)
        steps = {worker.process: worker.machine.steps for worker in world.rank_holders()}
        return [process for process, at in steps.items() if at.step == 1 and at.phase in in_step]

    # ---- before and after -------------------------------------------------------------------------------------------

    def _run_in_order(self, world: World, until: Callable[[], bool]) -> None:
        world.rng = Tape(())  # type: ignore[assignment]  # it is asked the same questions
        untimed = _untimed(world)
        since_s, num_events = untimed.now_s, 0
        while not until():
            event = untimed.take(0) if untimed.pending else untimed.next_deadline()
            self._happen(world, event)
            num_events += 1
            self._check_patience(world, since_s, num_events)

    def _finish(self, world: World) -> None:
        """Runs a world in one order to its end. The job must succeed."""
        self.found.num_ends += 1
        self._run_in_order(world, lambda: world.ended is not None or self.found.violation is not None)
        if self.found.violation is None and (world.ended is None or world.ended.exit_code != 0):
            self.found.violation = str(ViolationError(Check.ENDED, str(world.ended)))

    @staticmethod
    def _has_begun_step(world: World, step: int) -> bool:
        holders = world.rank_holders()
        return bool(holders) and all(worker.machine.steps.step >= step for worker in holders)

    @staticmethod
    def _spare_is_warm(world: World) -> bool:
        return all(worker.machine.state is WorkerState.READY for worker in world.spares())

    def _is_over(self, world: World) -> bool:
        """Returns whether the ranks train again, no rank can be killed any more, the job ended, or a check failed."""
        if self.found.violation is not None or world.ended is not None:
            return True
        last = world.oracle.cohorts[-1]
        has_resumed = last.number > 1 and len(last.began) == len(last.members)
        return has_resumed or not (world.oracle.num_failures or self._victims(world))

    def _fingerprint(self, world: World) -> int:
        untimed = _untimed(world)
        pending = sorted((repr(_line(event)), repr(_without_counters(event))) for event in untimed.pending)
        deadlines = untimed.deadlines
        untimed.deadlines, events, untimed.pending = [], untimed.pending, []
        mark = self._copier.fingerprint(world)
        untimed.deadlines, untimed.pending = deadlines, events
        return hash((mark, tuple(pending)))


def _what_is_left(worker: SimulatedWorker) -> object:
    """Returns what still matters of a dead process, before and after its agent knows of its end; None if it lives."""
    if worker.is_alive:
        return None
    if worker.number in worker.node.workers:
        return worker.process, worker.machine.rank, worker.exit, worker.tag
    return worker.process, worker.machine.rank


def _untimed(world: World) -> Untimed:
    assert isinstance(world.schedule, Untimed)
    return world.schedule


def _is_upward(event: Event) -> bool:
    return event.part == "network" and event.what == "arrive" and event.arguments[1] == CONTROLLER


_DISTURBING = {"exited", "training_thread_died", "peer_reset", "transfer_broke"}
"""Events that may lead to another `Stop`."""


def _stands_alone(world: World, event: Event, is_quiet: bool) -> bool:
    """Returns whether an event may happen now without a loss of outcomes, because it is independent of all others.

    No rank is killed after the first. So if a worker waits for an order, this order is its next event, whatever happens
    elsewhere, and its report may be in transit for any time. An order to a dead process does nothing. When no pending
    event may stop the ranks once more, the same is true for all of a worker's own events, and for the end of a transfer
    at its source. Events of the agent, and the end of a transfer at a receiver, are explored in every order.
    """
    if not world.oracle.num_failures:
        return False
    if event.part == "transfers":
        (_, transfer), rank, _ = event.arguments
        return is_quiet and rank in transfer.sources
    if not event.part.startswith("worker "):
        return False
    worker = world.workers[int(event.part.split()[1])]
    return is_quiet or not worker.is_alive or (event.what == "order" and worker.is_idle)


def _is_quiet(events: list[Event]) -> bool:
    """Returns whether no pending event may stop the ranks once more."""
    return not any(event.what in _DISTURBING or any(map(_disturbs, event.arguments)) for event in events)


def _disturbs(argument: object) -> bool:
    messages = argument.messages if isinstance(argument, msg.Packet) else (argument,)
    kinds = (msg.Stop, msg.CollectiveFailed, msg.WorkerLost, msg.WorkerFenced, msg.FenceWorker)
    return any(isinstance(message, kinds) for message in messages)


def _is_stale(world: World, event: Event) -> bool:
    """Returns whether an event has no effect any more, because the operation that it ends was interrupted."""
    match event.what:
        case "perform":
            return not world.workers[int(event.part.split()[1])].is_at(event.arguments[0])
        case "arrived":
            return not world.collectives.awaits(*event.arguments)
        case "peer_reset":
            worker = world.workers[int(event.part.split()[1])]
            return not worker.is_alive or worker.in_collective != event.arguments[0]
        case "training_thread_died":
            return event.arguments[1] not in world.nodes[event.part].workers
        case _:
            return False


def _without_counters(event: Event) -> tuple[object, ...]:
    match event.what:
        case "perform":
            return event.what, event.arguments[1:]
        case "arrive" if event.part == "network":
            return event.what, event.arguments[2].messages
        case _:
            return event.what, event.arguments
