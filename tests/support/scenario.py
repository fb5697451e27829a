"""Scenarios as text: a small cluster, its faults, and the resulting trace.

A scenario file begins with a title, then names its cluster and its faults, one per line. After an empty line follows
the trace::

    A rank is killed in forward
    3 ranks, 1 spares, 2 nodes, 4 steps
    kill rank 1 in forward of step 2

       2.920  FAULT   ...
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from keepstep.errors import ConfigurationError
from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.oracle import Check, ViolationError
from keepstep.sim.run import PATIENCE_S
from keepstep.sim.story import Story
from keepstep.sim.world import World

_CLUSTER = re.compile(r"(\d+) ranks, (\d+) spares, (\d+) nodes, (\d+) steps(?:, (\d+) shards)?(?:, seed (\d+))?$")
_PLACE = re.compile(
    r"(kill|stop) (?:rank (\d+)|ranks (\d+) and (\d+)) (?:in|when rank (\d+) is in) (\w+) of step (\d+)$"
)
_MOMENT = re.compile(r"(?:crash the controller|kill rank (\d+)) at (.+)$")
_DRAIN = re.compile(r"drain when rank (\d+) is in (\w+) of step (\d+)$")
CONTROLLER_IS_AWAY_S = 2.0


@dataclasses.dataclass(slots=True)
class Deed:
    """One fault of a scenario, and when it happens: at a place in a step, or at a line of the trace."""

    what: str
    ranks: tuple[int, ...]
    place: tuple[int, int, Phase] | None
    """(rank, step, phase)."""
    line: str | None
    is_done: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """The cluster and the faults of a scenario file."""

    title: str
    head: tuple[str, ...]
    layout: ClusterLayout
    seed: int
    deeds: tuple[Deed, ...]


def parse(text: str) -> Scenario:
    """Reads the head of a scenario file.

    Raises:
        ConfigurationError: a line has no meaning. The message contains it.
    """
    head = tuple(line for line in text.split("\n\n")[0].splitlines() if line)
    if len(head) < 2:
        raise ConfigurationError("a scenario begins with a title and its cluster")
    cluster = _CLUSTER.fullmatch(head[1])
    if cluster is None:
        raise ConfigurationError(f"scenario: {head[1]!r} is no cluster such as '3 ranks, 1 spares, 2 nodes, 4 steps'")
    num_ranks, num_spares, num_nodes, num_steps, num_shards, seed = (int(part or 0) for part in cluster.groups())
    return Scenario(
        head[0],
        head,
        _layout(num_ranks, num_spares, num_nodes, num_steps, num_shards or 1),
        seed,
        tuple(_deed(line) for line in head[2:]),
    )


def _layout(num_ranks: int, num_spares: int, num_nodes: int, num_steps: int, num_shards: int) -> ClusterLayout:
    per_node = -(-num_ranks // num_nodes)
    slots = [per_node + num_spares // num_nodes + (number < num_spares % num_nodes) for number in range(num_nodes)]
    nodes = tuple(NodeLayout(f"node-{number}", room, f"rack-{number}") for number, room in enumerate(slots))
    settings = dataclasses.replace(SETTINGS, world_size=num_ranks, num_spares=num_spares, ranks_per_node=per_node)
    shards = tuple(str(rank % num_shards) for rank in range(num_ranks))
    return ClusterLayout(nodes, shards, settings, num_steps=num_steps)


def _deed(line: str) -> Deed:
    if found := _PLACE.fullmatch(line):
        what, one, first, second, other, phase, step = found.groups()
        ranks = (int(one),) if one else (int(first), int(second))
        return Deed(what, ranks, (int(other or ranks[0]), int(step), Phase(phase)), None)
    if found := _MOMENT.fullmatch(line):
        rank, moment = found.groups()
        return Deed("kill" if rank else "crash", (int(rank),) if rank else (), None, moment)
    if found := _DRAIN.fullmatch(line):
        rank, phase, step = found.groups()
        return Deed("drain", (), (int(rank), int(step), Phase(phase)), None)
    raise ConfigurationError(f"scenario: {line!r} is no fault such as 'kill rank 1 in forward of step 2'")


def play(scenario: Scenario) -> str:
    """Returns the file of a scenario, with the trace that it produces now.

    Raises:
        ViolationError: a check of the oracle has failed.
    """
    story = Story()
    world = World(scenario.layout, scenario.seed, story)
    deeds = [dataclasses.replace(deed) for deed in scenario.deeds]
    world.add_part("scenario", _Doer(world))
    world.watch = _watcher(world, deeds)
    world.boot()
    while world.ended is None and world.schedule.now_s < PATIENCE_S:
        event = world.schedule.next()
        if event is None:
            break
        before = len(story.lines)
        world.happen(event)
        _look_for(world, deeds, story.lines[before:])
    if world.ended is None:
        raise ViolationError(Check.STUCK, scenario.title)
    if left := [deed for deed in deeds if not deed.is_done]:
        raise ConfigurationError(f"scenario {scenario.title!r}: the moment of {left[0]} never came")
    story.add(world.schedule.now_s, "END", world.ended.reason)
    return "\n".join([*scenario.head, "", *_from_first_fault(story.lines), ""])


def _from_first_fault(lines: list[str]) -> list[str]:
    first = next((number for number, line in enumerate(lines) if "  FAULT  " in line), 0)
    return lines[first:]


def _watcher(world: World, deeds: list[Deed]) -> Callable[[SimulatedWorker], None]:
    def watch(worker: SimulatedWorker) -> None:
        place = (worker.machine.rank, worker.machine.steps.step, worker.machine.steps.phase)
        for deed in deeds:
            if not deed.is_done and deed.place == place:
                _do(world, deed)

    return watch


def _look_for(world: World, deeds: list[Deed], lines: list[str]) -> None:
    for deed in deeds:
        if not deed.is_done and deed.line is not None and any(deed.line in line for line in lines):
            _do(world, deed)


def _do(world: World, deed: Deed) -> None:
    """Schedules a fault as the next event."""
    deed.is_done = True
    if not deed.ranks:
        world.schedule.after(0.0, Event("scenario", deed.what))
    for rank in deed.ranks:
        world.schedule.after(0.0, Event("scenario", deed.what, (rank,)))


class _Doer:
    """Injects the faults of a scenario."""

    def __init__(self, world: World) -> None:
        self._world = world

    def kill(self, rank: int) -> None:
        """Kills the process that holds a rank."""
        victim = self._victim(rank, "is killed")
        victim.die(Cause.SIGNAL, "killed by SIGKILL")

    def stop(self, rank: int) -> None:
        """Stops the process that holds a rank, as SIGSTOP does."""
        self._victim(rank, "is stopped").is_stopped = True

    def crash(self) -> None:
        """Kills the controller, and restarts it after a while."""
        self._tell("the controller is killed")
        self._world.oracle.strikes("controller crash")
        self._world.controller.crash()
        self._world.schedule.after(CONTROLLER_IS_AWAY_S, Event(CONTROLLER, "restart"))

    def drain(self) -> None:
        """Drains the job, as after SIGTERM."""
        self._tell("the launcher gets SIGTERM")
        self._world.oracle.drains_job()
        self._world.controller.drain()

    def _victim(self, rank: int, what: str) -> SimulatedWorker:
        victim = next(worker for worker in reversed(self._world.rank_holders()) if worker.machine.rank == rank)
        self._world.oracle.suffers(victim, what)
        self._tell(f"{victim} {what} in {victim.where}")
        return victim

    def _tell(self, what: str) -> None:
        assert self._world.story is not None
        self._world.story.add(self._world.schedule.now_s, "FAULT", what)
