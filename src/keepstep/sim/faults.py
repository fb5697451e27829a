"""The faults of a simulated job: their kinds, times and effects."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from keepstep.protocol.messages import Cause, CollectiveFailed, SafePointReached
from keepstep.protocol.phases import Phase
from keepstep.protocol.relay.gathering import SILENT_S
from keepstep.sim.cluster.control.network import CONTROLLER
from keepstep.sim.cluster.layout import ClusterLayout
from keepstep.sim.cluster.schedule import Event

if TYPE_CHECKING:
    from keepstep.sim.cluster.process import SimulatedProcess
    from keepstep.sim.world import World

Pairs = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedFault:
    """One fault: at a time, or a time after the n-th recovery has begun, or in a phase.

    ``pick`` chooses among the processes that the fault can hit when it happens, so that it hits one if there is any.
    """

    kind: str
    at_s: float
    recovery: int | None = None
    phase: Phase | None = None
    """If set, the fault waits after its time until some rank enters this phase, and happens some milliseconds later at
    most."""
    pick: int = 0
    lasts_s: float = 1.0

    def __str__(self) -> str:
        when = f"at {self.at_s:.3f} s" if self.recovery is None else f"{self.at_s:.3f} s into recovery {self.recovery}"
        phase = f" and with a rank in {self.phase}" if self.phase is not None else ""
        return f"{self.kind} #{self.pick} {when}{phase}, for {self.lasts_s:.2f} s"


PROCESS_FAULTS = ("kill", "exit", "raise", "stop", "deadlock", "slow", "blame", "false hint", "stale report")
NODE_FAULTS = (
    *("node loss", "agent restart", "agent pause", "cut off", "cut off one way", "cut data"),
    *("connection break", "clock jump"),
)
CONTROLLER_FAULTS = ("controller crash", "crash before journaling", "crash before transmitting", "controller pause")
OTHER_FAULTS = ("spare kill", "loss burst", "two at once")
RELAY_FAULTS = ("relay crash", "relay pause")
"""Faults of runs with relays."""
DEVICE_FAULTS = ("sick device",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
GROUP_FAULTS = ("group error",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
LOAD_FAULTS = ("refused load",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
WRONG_LOADS = ("wrong load",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
SUSPENSIONS = ("suspend",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
SILENCES = ("silent together",)
"""Faults in a tenth of the plans, drawn from a separate generator."""
OPERATOR_TAKES = 5.0
"""After so many times the longest deadline for silence, a process that is still silent is killed."""
OF_ONE_PROCESS = frozenset({*PROCESS_FAULTS[:7], *SUSPENSIONS, "spare kill", "two at once"})
"""Faults that the oracle counts only if they hit a process (`Oracle.suffers`)."""
WEIGHTS = dict.fromkeys(PROCESS_FAULTS, 3) | dict.fromkeys((*NODE_FAULTS, *CONTROLLER_FAULTS, *OTHER_FAULTS), 2)
WEIGHTS |= {"kill": 12, "stop": 5, "raise": 1, "blame": 1, "slow": 1, "agent restart": 1}

DRAINS = ("drain", "node drain")
"""Each is in a tenth of the plans. They are drawn after all other faults."""

SHORT_PHASES = (Phase.SYNCED, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED)
"""Phases around the gradient barrier and the update. A failure there is the hardest, and a random time seldom hits
them."""


def draw_plan(rng: random.Random, layout: ClusterLayout) -> tuple[SimulatedFault, ...]:
    """Returns a plan: some faults at random times, and more of them during the recoveries that those cause."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    span_s = 1.5 + 0.45 * layout.num_steps
    faults = []
    for number in range(max(1, int(rng.choice((0.1, 0.3, 0.5, 1.0, 1.5)) * layout.num_steps))):
        (kind,) = rng.choices(kinds, weights)
        during = number > 0 and rng.random() < 0.6
        at_s = rng.choice((0.0, 0.005, 0.02, 0.05, 0.1, 0.5)) * rng.random() * 2 if during else rng.uniform(0.3, span_s)
        recovery = rng.randint(1, max(1, number)) if during else None
        phase = rng.choice(SHORT_PHASES) if not during and rng.random() < 0.4 else None
        lasts_s = rng.choice((0.05, 0.5, 2.0, 5.0, 12.0)) * (0.5 + rng.random())
        faults.append(SimulatedFault(kind, at_s, recovery, phase, rng.randrange(64), lasts_s))
    for kind in (each for each in DRAINS if rng.random() < 0.1):
        faults += [SimulatedFault(kind, rng.uniform(0.3, span_s), None, None, rng.randrange(64), 5.0)]
    return tuple(faults)


def draw_relays(rng: random.Random, plan: tuple[SimulatedFault, ...]) -> tuple[int, tuple[SimulatedFault, ...]]:
    """Returns the number of relays of a job, and the plan with their faults added."""
    num_relays = rng.choice((0, 0, 1, 2, 3))
    faults = []
    for _ in range(rng.choice((1, 2, 4)) if num_relays else 0):
        recovery = rng.choice((None, rng.randint(1, max(1, len(plan)))))
        at_s = rng.uniform(0.3, 8.0) if recovery is None else rng.choice((0.0, 0.005, 0.02, 0.1)) * rng.random() * 2
        kind = rng.choice(RELAY_FAULTS)
        faults.append(SimulatedFault(kind, at_s, recovery, None, rng.randrange(64), rng.choice((0.3, 1.4, 5.0))))
    return num_relays, plan + tuple(faults)


def draw_sick_device(rng: random.Random, plan: tuple[SimulatedFault, ...]) -> tuple[SimulatedFault, ...]:
    """Returns the plan, in a tenth of the cases with a sick device added."""
    if rng.random() >= 0.1:
        return plan
    return (*plan, SimulatedFault(rng.choice(DEVICE_FAULTS), rng.uniform(0.3, 8.0), None, None, rng.randrange(64), 8.0))


def draw_group_error(rng: random.Random, plan: tuple[SimulatedFault, ...]) -> tuple[SimulatedFault, ...]:
    """Returns the plan, in a tenth of the cases with an error of a group that the script itself has made."""
    if rng.random() >= 0.1:
        return plan
    recovery = rng.choice((None, 1))
    at_s = rng.uniform(0.3, 8.0) if recovery is None else rng.choice((0.1, 1.0)) * rng.random()
    return (*plan, SimulatedFault(rng.choice(GROUP_FAULTS), at_s, recovery, None, rng.randrange(64)))


def draw_load(
    rng: random.Random, plan: tuple[SimulatedFault, ...], kinds: tuple[str, ...], share: float
) -> tuple[SimulatedFault, ...]:
    """Returns the plan, in a share of the cases with state that is loaded and is then not what was loaded."""
    if rng.random() >= share:
        return plan
    return (*plan, SimulatedFault(rng.choice(kinds), rng.uniform(0.3, 8.0), None, None, rng.randrange(64)))


def draw_suspension(rng: random.Random, plan: tuple[SimulatedFault, ...]) -> tuple[SimulatedFault, ...]:
    """Returns the plan, in a tenth of the cases with a time in which all ranks are stopped, some of them, or one."""
    if rng.random() >= 0.1:
        return plan
    lasts_s = rng.choice((0.5, 5.0, 12.0, 40.0)) * (0.8 + 0.4 * rng.random())
    pick = rng.randrange(64)
    return (*plan, SimulatedFault(rng.choice(SUSPENSIONS), rng.uniform(0.3, 8.0), None, None, pick, lasts_s))


def draw_silence(rng: random.Random, plan: tuple[SimulatedFault, ...]) -> tuple[SimulatedFault, ...]:
    """Returns the plan, in a tenth of the cases with a time in which half of the nodes do not reach the controller."""
    if rng.random() >= 0.1:
        return plan
    pick, lasts_s = rng.randrange(64), rng.choice((2.0, 5.0, 10.0, 40.0)) * (0.8 + 0.4 * rng.random())
    return (*plan, SimulatedFault(rng.choice(SILENCES), rng.uniform(0.3, 8.0), None, None, pick, lasts_s))


class Injector:
    """Injects the faults of a plan into one world."""

    def __init__(self, world: World, plan: tuple[SimulatedFault, ...]) -> None:
        self._world = world
        self.over_s = 0.0
        """The time at which the last fault is over."""
        self._armed: list[SimulatedFault] = []
        self._raised: set[int | None] = set()
        """Ranks on which the script has raised an error."""
        for fault in plan:
            event = Event("injector", "strike" if fault.phase is None else "arm", (fault,))
            if fault.recovery is None:
                world.schedule.at(fault.at_s, event)
            else:
                world.waiting_for_recovery.append((fault.recovery, fault.at_s, event))

    def arm(self, fault: SimulatedFault) -> None:
        """Makes a fault wait for its phase."""
        self._armed.append(fault)
        self._world.watch = self._watch

    def _watch(self, worker: SimulatedProcess) -> None:
        """Schedules the faults that wait for the phase that a worker has just entered."""
        for fault in [fault for fault in self._armed if fault.phase is worker.tag.phase]:
            self._armed.remove(fault)
            delay_s = self._world.rng.choice((0.0, 0.0005, 0.002, 0.01))
            self._world.schedule.after(delay_s, Event("injector", "strike", (fault,)))

    def strike(self, fault: SimulatedFault) -> None:
        """Injects a fault."""
        world = self._world
        if world.story is not None:
            world.story.add(world.schedule.now_s, "FAULT", str(fault))
        self.over_s = max(self.over_s, world.schedule.now_s)
        if fault.kind not in OF_ONE_PROCESS:
            world.oracle.strikes(fault.kind, fault.lasts_s)
        getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)

    def _until(self, fault: SimulatedFault, part: str, what: str, *arguments: object) -> None:
        """Schedules an event for the end of a fault."""
        self.over_s = max(self.over_s, self._world.schedule.now_s + fault.lasts_s)
        self._world.schedule.after(fault.lasts_s, Event(part, what, arguments))

    # ---- processes --------------------------------------------------------------------------------------------------

    def _victim(self, fault: SimulatedFault) -> SimulatedProcess | None:
        """Returns a live process with a rank that is neither stopped nor stuck; None if there is none."""
        candidates = [worker for worker in self._world.rank_holders() if not (worker.is_stopped or worker.is_stuck)]
        if not candidates:
            return None
        victim = candidates[fault.pick % len(candidates)]
        if self._world.story is not None:
            self._world.story.add(self._world.schedule.now_s, "FAULT", f"{fault.kind} hits {victim}, {victim.where}")
        return victim

    def _hurt(self, fault: SimulatedFault) -> SimulatedProcess | None:
        victim = self._victim(fault)
        if victim is not None:
            self._world.oracle.suffers(victim, fault.kind, fault.lasts_s)
            self._excuse_outside_of_training(fault.kind)
        return victim

    def _kill(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            victim.die(Cause.SIGNAL, "killed by SIGKILL")

    def _exit(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            victim.die(Cause.EXIT, "exit code 7")

    def _raise(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            self._raised.add(victim.machine.rank)
            if len(self._raised) == self._world.layout.world_size:
                self._world.oracle.excuses("the script raised on every rank")
            victim.raise_error("ValueError: bad batch")

    def _two_at_once(self, fault: SimulatedFault) -> None:
        self._kill(fault)
        self._kill(dataclasses.replace(fault, pick=fault.pick // 7))

    def _stop(self, fault: SimulatedFault) -> None:
        """Sends SIGSTOP, and in half of the cases SIGCONT after a while."""
        if victim := self._hurt(fault):
            victim.is_stopped = True
            if fault.pick % 2:
                self._until(fault, f"worker {victim.process}", "go_on")
            else:
                self._put_down_later(fault, victim)

    def _put_down_later(self, fault: SimulatedFault, victim: SimulatedProcess) -> None:
        """Kills a process if it is silent for so long that only an operator can help: it has the last copy."""
        long_s = OPERATOR_TAKES * self._world.layout.settings.deadlines.long_s
        self._until(dataclasses.replace(fault, lasts_s=long_s), f"worker {victim.process}", "put_down")

    def _suspend(self, fault: SimulatedFault) -> None:
        """Stops processes at once, and continues them after a while.

        They are those of all ranks, as ``scontrol suspend`` does it, of a node, of some ranks, or of one.
        """
        holders = self._world.rank_holders()
        if not holders:
            return
        scope, pick = fault.pick % 4, fault.pick // 4
        if scope == 1:
            names = sorted({worker.node.name for worker in holders})
            holders = [worker for worker in holders if worker.node.name == names[pick % len(names)]]
        elif scope == 2:
            holders = holders[pick % len(holders) :]
        elif scope == 3:
            holders = [holders[pick % len(holders)]]
        self._world.oracle.suspended(holders, fault.lasts_s)
        for worker in holders:
            worker.is_stopped, worker.suspended_until_s = True, self._world.schedule.now_s + fault.lasts_s
            self._until(fault, f"worker {worker.process}", "go_on")
        self._excuse_outside_of_training(fault.kind)

    def _deadlock(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            victim.is_stuck = True
            self._put_down_later(fault, victim)

    def _slow(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            victim.slowness = 30.0
            self._until(fault, f"worker {victim.process}", "be_fast")

    def _blame(self, fault: SimulatedFault) -> None:
        if victim := self._hurt(fault):
            self._world.nodes[victim.node.name].blame(victim.number, "a false alarm")

    def _false_hint(self, fault: SimulatedFault) -> None:
        """Makes a collective fail although no process is lost."""
        if victim := self._victim(fault):
            victim.lose_connection()

    def _group_error(self, fault: SimulatedFault) -> None:
        """Makes a group fail that the script itself has made. All ranks stop; the groups that they need are intact."""
        if victim := self._victim(fault):
            victim.lose_group()

    def _refused_load(self, fault: SimulatedFault) -> None:
        """Makes the next load of any rank, or the next two of them, give something else than what was loaded."""
        self._world.num_loads_refused = 1 + fault.pick % 2

    def _wrong_load(self, fault: SimulatedFault) -> None:
        """Makes the next load, or two, give something else, which no rank notices: at once or in the next update."""
        self._world.wrong_loads = [bool(fault.pick % 2)] * (1 + fault.pick // 2 % 2)

    def _stale_report(self, fault: SimulatedFault) -> None:
        """Sends a report of an earlier generation."""
        if victim := self._victim(fault):
            generation = max(0, victim.tag.generation - 1 - fault.pick % 2)
            if fault.pick % 3:
                step, phase = max(0, victim.tag.step - 1), Phase.FORWARD
                report = SafePointReached(
                    (victim.number,), generation, step, phase, (step,), step, (), False, (), None, None
                )
                victim.repeat_report(report)
            else:
                victim.repeat_report(CollectiveFailed(victim.number, generation, "world", "late"))

    def _spare_kill(self, fault: SimulatedFault) -> None:
        spares = self._world.spares()
        if spares:
            spare = spares[fault.pick % len(spares)]
            self._world.oracle.suffers(spare, fault.kind)
            spare.die(Cause.SIGNAL, "killed by SIGKILL")

    # ---- nodes and networks -----------------------------------------------------------------------------------------

    def _node(self, fault: SimulatedFault) -> str:
        names = [node.name for node in self._world.layout.nodes]
        return names[fault.pick % len(names)]

    def _lose_node(self, fault: SimulatedFault, *, comes_back: bool) -> None:
        name = self._node(fault)
        self._world.oracle.num_failures += 1
        self._world.oracle.node_began_new_life(name)
        if not self._world.oracle.has_trained:
            self._world.oracle.excuses("a node lost before the first step")
        if len(self._world.oracle.finished_ranks):
            self._world.oracle.excuses("a node lost after the last step")
        self._world.nodes[name].crash()
        if comes_back:
            self._until(fault, name, "boot")

    def _node_loss(self, fault: SimulatedFault) -> None:
        self._lose_node(fault, comes_back=fault.pick % 3 > 0)

    def _agent_restart(self, fault: SimulatedFault) -> None:
        self._lose_node(dataclasses.replace(fault, lasts_s=0.2), comes_back=True)

    def _cut(self, fault: SimulatedFault, pairs: Pairs) -> None:
        self._world.network.cut(pairs)
        self._until(fault, "network", "heal", pairs)

    def _cut_off(self, fault: SimulatedFault) -> None:
        name = self._node(fault)
        others = [CONTROLLER, *(node for node in self._world.nodes if node != name)]
        self._cut(fault, tuple(pair for other in others for pair in ((name, other), (other, name))))

    def _cut_off_one_way(self, fault: SimulatedFault) -> None:
        name = self._node(fault)
        self._cut(fault, ((name, CONTROLLER),) if fault.pick % 2 else ((CONTROLLER, name),))

    def _silent_together(self, fault: SimulatedFault) -> None:
        """Cuts at least half of the nodes, and more than one, off from the controller, but not from each other."""
        names = list(self._world.nodes)
        first = fault.pick % len(names)
        cut = [*names[first:], *names[:first]][: max(2, -(-len(names) // 2))]
        self._cut(fault, tuple(pair for name in cut for pair in ((name, CONTROLLER), (CONTROLLER, name))))

    def _cut_data(self, fault: SimulatedFault) -> None:
        names = list(self._world.nodes)
        here, there = names[fault.pick % len(names)], names[fault.pick // 7 % len(names)]
        if here != there:
            self._cut(fault, ((here, there),))

    def _connection_break(self, fault: SimulatedFault) -> None:
        self._world.network.break_connection(self._node(fault))

    def _loss_burst(self, fault: SimulatedFault) -> None:
        self._world.network.extra_loss = 0.5
        self._until(fault, "injector", "end_loss")

    def end_loss(self) -> None:
        """Ends a burst of lost packets."""
        self._world.network.extra_loss = 0.0

    def _agent_pause(self, fault: SimulatedFault) -> None:
        self._pause(self._node(fault), fault)

    def _controller_pause(self, fault: SimulatedFault) -> None:
        self._pause(CONTROLLER, fault)

    def _pause(self, part: str, fault: SimulatedFault) -> None:
        self._world.freeze(part)
        self._until(fault, "world", "thaw", part)

    def _relay_crash(self, fault: SimulatedFault) -> None:
        if relays := self._world.relays.all:
            self._world.relays.crash(fault.pick % len(relays))

    def _relay_pause(self, fault: SimulatedFault) -> None:
        """Pauses a relay. The controller kills it if it gives no sign of life for too long."""
        relays = [relay for relay in self._world.relays.all if relay.is_up]
        if not relays:
            return
        relay = relays[fault.pick % len(relays)]
        self._world.freeze(relay.name)
        if fault.lasts_s < SILENT_S:
            self._until(fault, "world", "thaw", relay.name)
        else:
            self._until(dataclasses.replace(fault, lasts_s=SILENT_S), "relays", "crash", relay.number)

    def _clock_jump(self, fault: SimulatedFault) -> None:
        self._world.nodes[self._node(fault)].clock_jump_s += fault.lasts_s

    def _sick_device(self, fault: SimulatedFault) -> None:
        """Makes one device of a node sick. In half of the cases the device has failed, and its rank is lost."""
        node, oracle = self._world.nodes[self._node(fault)], self._world.oracle
        num_devices, has_failed = node.layout.num_devices or node.layout.slots, fault.pick % 2 == 0
        device = fault.pick // 4 % num_devices
        if not node.is_up or device in node.closed:
            return
        oracle.devices.sickens(node.name, device, has_failed=has_failed, is_calm=oracle.is_calm())
        ranks = [each for each in self._world.rank_holders() if each.node is node and each.device == device]
        if has_failed and ranks:
            self._excuse_outside_of_training(fault.kind)
            oracle.suffers(ranks[0], "failed device")
        else:
            oracle.causes.add(f"device {device} of {node.name} is sick")
        node.close(device, has_failed=has_failed)
        self._until(fault, node.name, "should_be_left", device)

    def _excuse_outside_of_training(self, kind: str) -> None:
        if not self._world.oracle.has_trained:
            self._world.oracle.excuses(f"{kind} before the first step")
        if len(self._world.oracle.finished_ranks):
            self._world.oracle.excuses(f"{kind} after the last step")

    def _node_drain(self, fault: SimulatedFault) -> None:
        """Sends SIGTERM to an agent, whose grace period ends after a while. Its machine comes back later."""
        name = self._node(fault)
        self._world.oracle.drains_node(name)
        self._world.nodes[name].drain()
        self._until(fault, name, "depart")
        self._until(dataclasses.replace(fault, lasts_s=2 * fault.lasts_s), name, "boot")

    # ---- the controller ---------------------------------------------------------------------------------------------

    def _drain(self, fault: SimulatedFault) -> None:
        """Sends SIGTERM to the job."""
        self._world.oracle.drains_job()
        self._world.controller.drain()

    def _controller_crash(self, fault: SimulatedFault) -> None:
        self._world.oracle.num_failures += 1
        self._world.controller.crash()
        self._until(fault, CONTROLLER, "restart")

    def _crash_before_journaling(self, fault: SimulatedFault) -> None:
        self._world.oracle.num_failures += 1
        self._world.controller.crash_before("journaling")
        self._until(fault, CONTROLLER, "restart")

    def _crash_before_transmitting(self, fault: SimulatedFault) -> None:
        self._world.oracle.num_failures += 1
        self._world.controller.crash_before("transmitting")
        self._until(fault, CONTROLLER, "restart")
