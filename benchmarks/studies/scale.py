"""What one recovery costs the controller by world size: real agents' and controller's machines, virtual time.

The controller is one server: while it works on a packet the next ones wait. Its processor time is measured, decoding
and encoding included, and counts into the virtual time, so what it cannot do at once shows. Everything else is the same
at every world size: the network, how long ranks take to their safe points, to connect and to restore (without bytes).

    python -m benchmarks.studies.scale --devices 16384 --plot scale.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.studies import plots
from rich.console import Console
from rich.table import Table

from keepstep.errors import ConfigurationError, InternalError
from keepstep.protocol import messages as msg
from keepstep.protocol.agent import AgentMachine, HandOver, Spawn
from keepstep.protocol.controller import ControllerMachine
from keepstep.protocol.liveness import LivenessSettings
from keepstep.protocol.messages import Cause, Tag
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoverySettings, Stage
from keepstep.transports import codec

DEVICES_PER_NODE = 8
SIZES = (8, 64, 512, 4096, 16_384, 65_536, 100_000)
STEP = 1000
"""The step in which a rank is lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumptions:
    """What does not depend on the world size, in seconds. Groups are taken to connect in constant time."""

    network_s: tuple[float, float] = (0.0001, 0.0005)
    """One way between controller and agent, within one site."""
    exit_s: float = 0.0001
    """From the death of a rank to its agent's knowledge: the lifeline, measured."""
    stop_s: tuple[float, float] = (0.0, 0.015)
    """From `Stop` to the safe point: between two stop points of a pass of one second."""
    connect_s: tuple[float, float] = (0.008, 0.020)
    restore_s: tuple[float, float] = (0.010, 0.030)
    """Everything about a transfer that is not its bytes."""
    step_s: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One recovery at one world size. Times in seconds; virtual, but for those that say ``cpu``."""

    devices: int
    detect_s: float
    stop_s: float
    reset_s: float
    restore_s: float
    decide_cpu_s: float
    cpu_s: float
    """Of the controller, for the whole recovery."""
    num_packets: int
    """That the controller received for it."""

    @property
    def stop_to_resume_s(self) -> float:
        """From the loss known to the controller until every rank stands at the resume step."""
        return self.stop_s + self.reset_s + self.restore_s


class Cluster:
    """One job of so many devices, and one lost rank."""

    def __init__(self, devices: int, assumptions: Assumptions, seed: int = 0) -> None:
        self._assumed = assumptions
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._entries: list[tuple[float, int, str, str, object]] = []
        self._number = 0
        self._busy_until_s = 0.0
        self._wakes_s: dict[str, float] = {}
        self.cpu_s = self.decide_cpu_s = 0.0
        self.num_packets = 0
        per_node = min(devices, DEVICES_PER_NODE)
        num_nodes = -(-devices // per_node)
        self.controller = ControllerMachine(RecoverySettings(num_nodes * per_node, 1, per_node), lease_s=None)
        self.agents = {
            f"node-{number}": AgentMachine(
                msg.NodeJoined(f"node-{number}", per_node + (number == 0), "site", 0, 0), 1, LivenessSettings()
            )
            for number in range(num_nodes)
        }

    def lose_a_rank(self) -> Row:
        """Starts the job, kills a rank, and returns what its recovery took."""
        job = self.controller.job
        for node in self.agents:
            self._transmit(node)
        self._run_until(lambda: job.stage is Stage.TRAINING and any(spare.ready for spare in job.roster.spares()))
        lost_s = max(self._now_s, self._busy_until_s) + 1.0  # when the queue of the start-up is empty
        self._run_until(lambda: self._now_s >= lost_s)
        # The agents live in this process, too: the collector would go through all of them on the controller's time.
        gc.freeze()
        self.cpu_s, self.num_packets, lost_s = 0.0, 0, self._now_s
        victim = max(job.roster.holders(), key=lambda worker: worker.worker)
        self._later(self._assumed.exit_s, "exited", victim.node, victim.worker)
        self._run_until(lambda: bool(job.records) and job.stage is Stage.TRAINING)
        (record,) = job.records
        marks = (lost_s, record.begun_s, record.decided_s, record.reset_s, record.restored_s)
        begun, stopped, reset, restored = _parts(marks)
        return Row(
            job.settings.world_size, begun, stopped, reset, restored, self.decide_cpu_s, self.cpu_s, self.num_packets
        )

    # ---- what happens -----------------------------------------------------------------------------------------------

    def _later(self, delay_s: float, what: str, node: str, content: object) -> None:
        self._number += 1
        heapq.heappush(self._entries, (self._now_s + delay_s, self._number, what, node, content))

    def _run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._entries:
                raise InternalError(f"the simulated job stands still in stage {self.controller.job.stage}")
            self._now_s, _, what, node, content = heapq.heappop(self._entries)
            if what == "to controller":
                self._serve(content)
            else:
                self._agent_acts(what, node, content)
                self._transmit(node)

    def _serve(self, frame: object) -> None:
        """The controller works on one packet, when it has done with those before it."""
        assert isinstance(frame, bytes)
        begin_s = max(self._now_s, self._busy_until_s)
        before, began = self.controller.job.stage, time.thread_time()
        packet = codec.decode(frame)
        assert isinstance(packet, msg.Packet)
        self.controller.receive(packet, begin_s)
        self.controller.take_entries()
        answers = [(answer.node, codec.encode(answer)) for answer in self.controller.packets(begin_s)]
        cpu_s = time.thread_time() - began
        self.cpu_s += cpu_s
        self.num_packets += 1
        if before is Stage.STOPPING and self.controller.job.stage is Stage.RECOVERING:
            self.decide_cpu_s = cpu_s
        self._busy_until_s = begin_s + cpu_s
        for node, answer in answers:
            delay_s = self._busy_until_s - self._now_s + self._drawn(self._assumed.network_s)
            self._later(delay_s, "packet", node, answer)

    def _agent_acts(self, what: str, node: str, content: object) -> None:
        agent = self.agents[node]
        match content:
            case bytes():
                packet = codec.decode(content)
                assert isinstance(packet, msg.Packet | msg.NodeEvicted)
                agent.receive(packet, self._now_s)
            case int() if what == "exited":
                tag = Tag(1, STEP, Phase.BACKWARD)
                agent.exited(content, Cause.SIGNAL, "killed by SIGKILL", tag, self._now_s)
            case tuple():
                number, report = content
                agent.said(number, report, self._now_s)
            case _:
                self._wakes_s.pop(node, None)
                agent.tick(self._now_s)
        for effect in agent.take():
            if isinstance(effect, Spawn):
                agent.spawned(effect.worker, 1000 + effect.worker)
                self._worker_says(node, effect.worker, 0.0, msg.WorkerJoined(effect.worker, 1000 + effect.worker))
                if effect.rank is None:
                    self._worker_says(node, effect.worker, 0.1, _ready(effect.worker, 0, ()))
            elif isinstance(effect, HandOver):
                for number in effect.workers:
                    self._worker_obeys(node, number, effect.order)

    def _worker_obeys(self, node: str, number: int, order: msg.WorkerOrder) -> None:
        """What a rank that is well does on an order, and how long it takes."""
        assumed = self._assumed
        match order:
            case msg.Assign() if order.generation == 1:
                self._worker_says(node, number, 0.01, msg.GroupsReset((number,), 1))
                self._worker_says(node, number, 0.5, _ready(number, 1, (0,)))
            case msg.Stop():
                report = msg.SafePointReached(
                    (number,), order.generation, STEP, Phase.BACKWARD, (STEP,), STEP, (), False
                )
                self._worker_says(node, number, self._drawn(assumed.stop_s), report)
            case msg.Recover():
                connected_s = self._drawn(assumed.connect_s)
                if order.generation > 1:
                    self._worker_says(node, number, connected_s, msg.GroupsReset((number,), order.generation))
                recovered_s = connected_s + self._drawn(assumed.restore_s)
                self._worker_says(node, number, recovered_s, msg.StateRecovered((number,), order.generation, 0))
            case _:
                pass

    def _worker_says(self, node: str, number: int, delay_s: float, report: msg.WorkerReport) -> None:
        self._later(delay_s, "said", node, (number, report))

    def _transmit(self, node: str) -> None:
        agent = self.agents[node]
        for packet in agent.packets(self._now_s):
            self._later(self._drawn(self._assumed.network_s), "to controller", node, codec.encode(packet))
        due_s = agent.next_deadline()
        if due_s < self._wakes_s.get(node, math.inf):
            self._wakes_s[node] = due_s
            self._later(max(0.0, due_s - self._now_s) + 1e-6, "wake", node, None)

    def _drawn(self, span_s: tuple[float, float]) -> float:
        return self._random.uniform(*span_s)


def _ready(worker: int, generation: int, reach: tuple[int, ...]) -> msg.WorkerReady:
    return msg.WorkerReady(worker, generation, reach, (), False, "0")


def _parts(marks: Sequence[float | None]) -> list[float]:
    """What lies between the moments of a recovery that came to its end."""
    moments = [mark for mark in marks if mark is not None]
    return [late - early for early, late in itertools.pairwise(moments)]


def measure(devices: int, assumptions: Assumptions | None = None) -> list[Row]:
    """One row for each world size up to ``devices``."""
    sizes = [size for size in SIZES if size < devices] + [devices]
    try:
        return [Cluster(size, assumptions or Assumptions()).lose_a_rank() for size in sizes]
    finally:
        gc.unfreeze()


def report(console: Console, devices: int, plot: Path | None) -> None:
    """Prints the table, says what grows, and draws the curves.

    Raises:
        ConfigurationError: too few devices, or the plot cannot be drawn.
    """
    if devices < 2:
        raise ConfigurationError(f"--devices {devices}: allowed are 2 and more")
    rows = measure(devices)
    table = Table(
        box=None, title="One lost rank: milliseconds of virtual time by part, and the controller's own processor time"
    )
    heads = ("devices", "detect", "stop", "reset", "restore", "stop..resume", "decide CPU", "CPU", "packets")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        parts = (
            row.detect_s,
            row.stop_s,
            row.reset_s,
            row.restore_s,
            row.stop_to_resume_s,
            row.decide_cpu_s,
            row.cpu_s,
        )
        table.add_row(f"{row.devices:,}", *(f"{part * 1e3:,.1f}" for part in parts), f"{row.num_packets:,}")
    console.print(table)
    console.print(_what_grows(rows), highlight=False)
    if plot is not None:
        series = {
            "stop to resume (virtual)": [(row.devices, row.stop_to_resume_s) for row in rows],
            "controller, processor time": [(row.devices, row.cpu_s) for row in rows],
            "the decision alone": [(row.devices, row.decide_cpu_s) for row in rows],
        }
        plots.line_chart(plot, "One recovery by world size", "devices", "seconds", series, log_y=True)


def _what_grows(rows: list[Row]) -> str:
    """The ratios that the table is there for."""
    last = rows[-1]
    lines = [
        f"The decision takes {last.decide_cpu_s:.3f} s of processor time at {last.devices:,} devices.",
        f"The controller spends {last.cpu_s / last.num_packets * 1e6:.0f} us on a packet, of which every node sends "
        "one per part: that, and the size of the decision, are what grows with the world. Orders to all ranks are one "
        "message, the same for every node, and answers come once per node.",
    ]
    between = {row.devices: row.stop_to_resume_s for row in rows}
    if 64 in between and 16_384 in between:
        lines.append(f"Stop to resume at 16,384 devices is {between[16_384] / between[64]:.2f} times that at 64.")
    return "\n".join(lines)


def main() -> None:
    """Prints the study that the command line asks for."""
    parser = argparse.ArgumentParser(description="The controller's cost of one recovery by world size.")
    parser.add_argument(
        "--devices", type=int, default=512, metavar="N", help="the largest world (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves, as .svg or .png")
    chosen = parser.parse_args()
    try:
        report(Console(soft_wrap=True), chosen.devices, chosen.plot)
    except ConfigurationError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
