"""A simulated job of many ranks, recorded once, and fed into a run's folder as time goes by: what a dashboard follows."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import msgspec

from keepstep.protocol.messages import Cause, PhasesObserved
from keepstep.sim.cluster.layout import LIVENESS, SETTINGS, Layout, NodeLayout
from keepstep.sim.recording import Recording
from keepstep.sim.world import World
from keepstep.trace.record import runfolder
from keepstep.trace.record.journal import read
from keepstep.trace.record.phaselog import PhaseTail, records_of
from keepstep.trace.record.recorder import Recorder

SLOW_RANK, SLOWNESS = 77, 1.6
KILLED_RANK, LOST_NODE = 300, "node-9"


def simulate(folder: Path, num_nodes: int, ranks_per_node: int, until_s: float) -> float:
    """Records a job: a rank that is slow all the time, one that is killed at a third, a node that is lost at two thirds.

    Args:
        folder: where to.
        num_nodes: those with ranks; one in sixteen more has spares.
        ranks_per_node: on each.
        until_s: virtual time of its end.

    Returns:
        the virtual time at which training has begun.
    """
    num_spare_nodes = -(-num_nodes // 16)
    nodes = tuple(NodeLayout(f"node-{n}", ranks_per_node, f"rack-{n // 8}") for n in range(num_nodes + num_spare_nodes))
    world_size = num_nodes * ranks_per_node
    settings = dataclasses.replace(
        SETTINGS, world_size=world_size, num_spares=num_spare_nodes * ranks_per_node, ranks_per_node=ranks_per_node
    )
    layout = Layout(nodes, ("0",) * world_size, settings, LIVENESS, num_steps=1_000_000)
    world = World(layout, seed=1)
    world.watch = lambda worker: _slow_down(worker)
    deeds = [(until_s / 3, lambda: _kill(world)), (until_s * 2 / 3, lambda: world.nodes[LOST_NODE].crash())]
    with Recording(folder, f"{world_size} ranks on {num_nodes} nodes", settings) as recording:
        world.recording = recording
        world.boot()
        while (event := world.schedule.next()) is not None and world.schedule.now_s < until_s:
            world.happen(event)
            if deeds and world.schedule.now_s >= deeds[0][0]:
                deeds.pop(0)[1]()
    return next(entry.at_s for entry in read(folder / runfolder.JOURNAL) if entry.stage == "training")


def _slow_down(worker: object) -> None:
    if worker.machine.rank == SLOW_RANK:  # type: ignore[attr-defined]  # a simulated worker
        worker.slowness = SLOWNESS  # type: ignore[attr-defined]


def _kill(world: World) -> None:
    victim = next(worker for worker in world.rank_holders() if worker.machine.rank == KILLED_RANK)
    victim.die(Cause.SIGNAL, "killed by SIGKILL")


class Feeder:
    """Writes a recorded run into another folder, at the pace at which it happened."""

    def __init__(self, source: Path, target: Path, begin_s: float) -> None:
        """Args:
        source: the recorded run.
        target: an empty folder.
        begin_s: what happened up to then is there at once.
        """
        self._stopping = threading.Event()
        info = runfolder.read_info(source)
        self._shift_ns = time.monotonic_ns() - round(begin_s * 1e9)
        self._target = target
        entries = [(entry.at_s, entry) for entry in read(source / runfolder.JOURNAL)]
        frames = [
            (float(records_of(message)["at_ns"].max()) / 1e9, message)
            for _, message in PhaseTail(source / runfolder.PHASES).read()
        ]
        self._items = sorted([*entries, *frames], key=lambda item: item[0])
        self.num_changes = sum(len(records_of(message)) for _, message in frames)
        started = msgspec.structs.replace(info, started_ns=self._shift_ns, started_unix_ns=time.time_ns())
        target.mkdir(parents=True)
        self._occupied = runfolder.occupied(target)
        self._occupied.__enter__()
        runfolder.begin(target, started)
        self._thread = threading.Thread(target=self._feed, args=(begin_s,), daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._occupied.__exit__(None, None, None)

    def _feed(self, begin_s: float) -> None:
        with Recorder(self._target) as recorder:
            for at_s, item in self._items:
                delay_s = at_s - (time.monotonic_ns() - self._shift_ns) / 1e9
                if at_s > begin_s and delay_s > 0.005 and self._stopping.wait(delay_s):
                    return
                if isinstance(item, PhasesObserved):
                    records = records_of(item).copy()
                    records["at_ns"] += self._shift_ns
                    records["entered_ns"] += self._shift_ns
                    recorder.observed(msgspec.structs.replace(item, phases=records.tobytes()))
                else:
                    recorder.decided([_shifted(item, self._shift_ns / 1e9)])


def _shifted(entry: msgspec.Struct, shift_s: float) -> msgspec.Struct:
    """A journal's entry on the clock of this machine: its own time, and those in the reports that it tells of."""
    event = entry.event  # type: ignore[attr-defined]  # of every entry
    if hasattr(event, "reports"):
        reports = tuple(
            msgspec.structs.replace(report, **{name: getattr(report, name) + shift_s})
            if (name := next((n for n in ("since_s", "at_s") if hasattr(report, n)), None))
            else report
            for report in event.reports
        )
        event = msgspec.structs.replace(event, reports=reports)
    return msgspec.structs.replace(entry, at_s=entry.at_s + shift_s, event=event)  # type: ignore[attr-defined]
