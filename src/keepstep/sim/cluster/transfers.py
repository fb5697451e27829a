"""Transfers of state between ranks: in a recovery to its receivers, and in training as second copies to buddies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepstep.protocol.messages import Transfer
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.snapshots import Snapshot
from keepstep.sim.cluster.values import INCOMPLETE, History, Rows

if TYPE_CHECKING:
    from keepstep.sim.world import World

STOPPED_S = 0.1
"""Interval at which a second copy is tried again while its sender or receiver is stopped."""


@dataclasses.dataclass(slots=True)
class _UnderWay:
    transfer: Transfer
    step: int
    there: dict[int, SimulatedProcess] = dataclasses.field(default_factory=dict)
    """rank -> its process."""


class Transfers:
    """The transfers of a recovery, one for each replica group that needs one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[tuple[int, Transfer], _UnderWay] = {}

    def come(self, worker: SimulatedProcess, generation: int, transfer: Transfer, step: int) -> None:
        """Registers a source or a receiver that is ready. When all are, the state of the resume step moves."""
        under_way = self._open.setdefault((generation, transfer), _UnderWay(transfer, step))
        assert worker.machine.rank is not None
        under_way.there[worker.machine.rank] = worker
        num_members = len(transfer.sources) + len(transfer.receivers)
        worker.groups.begin_transfer(generation, str(transfer), num_members)
        if not transfer.sources or len(under_way.there) < num_members:
            return
        for rank in (*transfer.sources, *transfer.receivers):
            delay_s = self._world.draw(self._world.layout.durations.restore_s)
            process = under_way.there[rank].process
            event = Event("transfers", "arrive", ((generation, transfer), rank, process))
            self._world.schedule.after(delay_s, event)

    def arrive(self, key: tuple[int, Transfer], rank: int, process: int) -> None:
        """Ends the transfer at one rank: a receiver has all buckets, or a source has sent its own."""
        under_way = self._open.get(key)
        if under_way is None or rank not in under_way.there or under_way.there[rank].process != process:
            return
        worker = under_way.there[rank]
        worker.groups.end_transfer()
        if rank in under_way.transfer.sources:
            worker.sent()
            return
        sources = [under_way.there[source] for source in under_way.transfer.sources]
        copies = {self._sent_by(source, under_way) for source in sources}
        shard, parameters, rows = min(copies, key=repr)
        worker.received(parameters if len(copies) == 1 else (*parameters, INCOMPLETE), shard, rows)

    def _sent_by(self, source: SimulatedProcess, under_way: _UnderWay) -> tuple[str | None, History, Rows]:
        """Returns what a source sends: its own state, or a receiver's snapshot that it keeps as its buddy."""
        shards = {self._world.shard_of(rank) for rank in under_way.transfer.receivers}
        if source.shard in shards:
            return source.shard, source.parameters, source.local.rows
        kept = (source.snapshots.find(rank, under_way.step) for rank in under_way.transfer.receivers)
        found = next((each for each in kept if each is not None), None)
        if found is None:
            return None, (INCOMPLETE,), source.local.rows
        return found.shard, found.parameters, found.rows

    def leave(self, process: int) -> None:
        """Breaks the transfers of a process that ends or breaks its connections. The other processes may not notice."""
        for key, under_way in list(self._open.items()):
            ranks = [rank for rank, worker in under_way.there.items() if worker.process == process]
            if ranks:
                del self._open[key]
                for other in under_way.there.values():
                    if other.process != process and self._world.coin():
                        event = Event(f"worker {other.process}", "transfer_broke", ())
                        self._world.schedule.after(self._world.draw(0.01), event)


class SimulatedSecondCopies:
    """Second copies of snapshots in transit from ranks to their buddies."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send(self, sender: SimulatedProcess, snapshot: Snapshot) -> None:
        """Begins to send a snapshot to the rank's buddy."""
        membership, buddy = sender.machine.membership, sender.snapshots.buddy
        if buddy is None or membership is None:
            return
        sender.snapshots.unsent = snapshot.step
        number = membership.workers[buddy]
        receiver = next((each for each in self._world.rank_holders() if each.number == number), None)
        if receiver is None or receiver.machine.generation != sender.machine.generation:
            return  # the buddy is lost, or a stop is in transit
        if receiver.memory.find(snapshot.rank, snapshot.step) is not None:
            sender.second_copy_there(snapshot)
            return
        sender.groups.begin_second_copy()
        receiver.groups.begin_second_copy()
        before = receiver.memory.whole
        slot = receiver.memory.open(snapshot.rank, sender.snapshots.kept_step)
        self._world.oracle.snapshots.written_over(receiver, before)
        key = (sender.process, receiver.process, sender.machine.generation, slot)
        delay_s = self._world.draw(self._world.layout.durations.second_copy_s)
        self._world.schedule.after(delay_s, Event("second_copies", "arrive", (*key, snapshot)))

    def arrive(self, sender: int, receiver: int, generation: int, slot: int, snapshot: Snapshot) -> None:
        """Completes a second copy, unless it was interrupted."""
        source, target = self._world.workers.get(sender), self._world.workers.get(receiver)
        assert target is not None
        assert source is not None
        if source.is_stopped or target.is_stopped:
            again = Event("second_copies", "arrive", (sender, receiver, generation, slot, snapshot))
            self._world.schedule.after(STOPPED_S, again)
            return
        is_connected = all(
            each.is_alive and each.machine.generation == generation and not each.machine.interrupted
            for each in (source, target)
        )
        if not is_connected:
            target.memory.discard(slot)
            return
        target.memory.seal(slot, snapshot)
        self._world.oracle.snapshots.complete(target, snapshot)
        source.second_copy_there(snapshot)
