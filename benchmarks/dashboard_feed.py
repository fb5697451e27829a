"""Records a simulated job of many ranks once, and writes it into a run folder in real time, for a dashboard."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import msgspec

from keepstep.protocol.controller import JournalEntry, LeaseExpired, ReportsReceived
from keepstep.protocol.messages import Cause, PhasesObserved, StepObserved, WorkerLost
from keepstep.sim.cluster.layout import SETTINGS, ClusterLayout, NodeLayout
from keepstep.sim.cluster.worker import SimulatedWorker
from keepstep.sim.recording import Recording
from keepstep.sim.world import World
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import read
from keepstep.trace.record.phaselog import PhaseTail, records_of
from keepstep.trace.record.recorder import Recorder

SLOW_RANK, SLOWNESS = 5, 1.3
KILLED_RANK, LOST_NODE = 3, "node-1"
NODES_PER_SPARE_NODE = 16


def simulate(folder: Path, num_nodes: int, ranks_per_node: int, until_s: float) -> float:
    """Records a job: one rank is always slow, one is killed after a third of the time, a node is lost after two thirds.

    Args:
        folder: the folder of the recording.
        num_nodes: number of nodes with ranks. For each sixteen of them there is one more node with spares.
        ranks_per_node: number of ranks on each node.
        until_s: virtual time at which the job ends.

    Returns:
        the virtual time at which training has begun.
    """
    num_spare_nodes = -(-num_nodes // NODES_PER_SPARE_NODE)
    nodes = tuple(NodeLayout(f"node-{n}", ranks_per_node, f"rack-{n // 8}") for n in range(num_nodes + num_spare_nodes))
    world_size = num_nodes * ranks_per_node
    settings = dataclasses.replace(
        SETTINGS, world_size=world_size, num_spares=num_spare_nodes * ranks_per_node, ranks_per_node=ranks_per_node
    )
    layout = ClusterLayout(nodes, ("0",) * world_size, settings, num_steps=1_000_000)
    world = World(layout, seed=1)
    world.watch = _slow_down
    deeds = [(until_s / 3, lambda: _kill(world)), (until_s * 2 / 3, lambda: _lose_node(world))]
    with Recording(folder, f"{world_size} ranks on {num_nodes} nodes", settings) as recording:
        world.recording = recording
        world.boot()
        while (event := world.schedule.next()) is not None and world.schedule.now_s < until_s:
            world.happen(event)
            if deeds and world.schedule.now_s >= deeds[0][0]:
                deeds.pop(0)[1]()
    return next(entry.at_s for entry in read(folder / runfolder.JOURNAL) if entry.stage == "training")


def _slow_down(worker: SimulatedWorker) -> None:
    if worker.machine.rank == SLOW_RANK:
        worker.slowness = SLOWNESS


def _kill(world: World) -> None:
    victim = next(worker for worker in world.rank_holders() if worker.machine.rank == KILLED_RANK)
    world.oracle.suffers(victim, "kill")
    victim.die(Cause.SIGNAL, "killed by SIGKILL")


def _lose_node(world: World) -> None:
    world.oracle.causes.add("a node lost")
    world.oracle.node_began_new_life(LOST_NODE)
    world.nodes[LOST_NODE].crash()


class Feeder:
    """Writes a recorded run into another folder, at its original pace. Use it in a ``with`` block."""

    def __init__(self, source: Path, target: Path, begin_s: float) -> None:
        """Args:
        source: the recorded run.
        target: a folder that does not exist yet.
        begin_s: events up to this time are written at once.
        """
        self._begin_s = begin_s
        self._target = target
        self._stopping = threading.Event()
        self._shift_ns = time.monotonic_ns() - round(begin_s * 1e9)
        tail = PhaseTail(source / runfolder.PHASES)
        frames = [(float(records_of(message)["at_ns"].max()) / 1e9, message) for _, message in tail.read()]
        tail.close()
        entries = [(entry.at_s, entry) for entry in read(source / runfolder.JOURNAL)]
        self._items = sorted([*entries, *frames], key=lambda item: item[0])
        info = runfolder.read_info(source)
        started = msgspec.structs.replace(info, started_ns=self._shift_ns, started_unix_ns=time.time_ns(), ended=None)
        target.mkdir(parents=True)
        self._occupied = runfolder.occupied(target)
        self._occupied.__enter__()
        runfolder.begin(target, started)
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._occupied.__exit__(None, None, None)

    def _feed(self) -> None:
        with Recorder(self._target) as recorder:
            for at_s, item in self._items:
                delay_s = at_s - (time.monotonic_ns() - self._shift_ns) / 1e9
                if at_s > self._begin_s and delay_s > 0.005 and self._stopping.wait(delay_s):
                    return
                if isinstance(item, PhasesObserved):
                    records = records_of(item).copy()
                    records["at_ns"] += self._shift_ns
                    records["entered_ns"] += self._shift_ns
                    recorder.observed(msgspec.structs.replace(item, phases=records.tobytes()))
                else:
                    recorder.decided([_shifted(item, self._shift_ns / 1e9)])


def _shifted(entry: JournalEntry, shift_s: float) -> JournalEntry:
    """Returns a journal entry with its time, and the times in its event, shifted to this machine's clock."""
    event = entry.event
    if isinstance(event, ReportsReceived):
        reports = []
        for report in event.reports:
            if isinstance(report, WorkerLost):
                report = msgspec.structs.replace(report, since_s=report.since_s + shift_s)
            elif isinstance(report, StepObserved):
                report = msgspec.structs.replace(report, at_s=report.at_s + shift_s)
            reports.append(report)
        event = msgspec.structs.replace(event, reports=tuple(reports))
    elif isinstance(event, LeaseExpired):
        event = msgspec.structs.replace(event, heard_s=event.heard_s + shift_s)
    return msgspec.structs.replace(entry, at_s=entry.at_s + shift_s, event=event)
