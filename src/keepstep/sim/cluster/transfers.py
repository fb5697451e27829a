"""State on its way from the ranks that hold it to those that need it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepstep.protocol.messages import Transfer
from keepstep.sim.cluster.process import SimulatedProcess
from keepstep.sim.cluster.schedule import Event
from keepstep.sim.cluster.values import INCOMPLETE

if TYPE_CHECKING:
    from keepstep.sim.world import World


@dataclasses.dataclass(slots=True)
class _UnderWay:
    transfer: Transfer
    there: dict[int, SimulatedProcess] = dataclasses.field(default_factory=dict)
    """rank -> its process."""


class Transfers:
    """The transfers of a recovery, one for each replica group that needs one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[tuple[int, Transfer], _UnderWay] = {}

    def come(self, worker: SimulatedProcess, generation: int, transfer: Transfer) -> None:
        """A source or a receiver is ready; the bytes move when all are."""
        under_way = self._open.setdefault((generation, transfer), _UnderWay(transfer))
        assert worker.machine.rank is not None
        under_way.there[worker.machine.rank] = worker
        if not transfer.sources or len(under_way.there) < len(transfer.sources) + len(transfer.receivers):
            return
        for rank in (*transfer.sources, *transfer.receivers):
            delay_s = self._world.draw(self._world.layout.durations.restore_s)
            process = under_way.there[rank].process
            event = Event("transfers", "arrive", ((generation, transfer), rank, process))
            self._world.schedule.after(delay_s, event)

    def arrive(self, key: tuple[int, Transfer], rank: int, process: int) -> None:
        """The last bucket of one rank: a receiver has it all, or a source has sent its part."""
        under_way = self._open.get(key)
        if under_way is None or rank not in under_way.there or under_way.there[rank].process != process:
            return
        worker = under_way.there[rank]
        if rank in under_way.transfer.sources:
            worker.sent()
            return
        sources = [under_way.there[source] for source in under_way.transfer.sources]
        copies = {(source.shard, source.parameters, source.local.rows) for source in sources}
        shard, parameters, rows = min(copies, key=repr)
        worker.received(parameters if len(copies) == 1 else (*parameters, INCOMPLETE), shard, rows)

    def leave(self, process: int) -> None:
        """A process ends, or breaks its connections: the processes that still wait for it wait in vain."""
        for key, under_way in list(self._open.items()):
            ranks = [rank for rank, worker in under_way.there.items() if worker.process == process]
            if ranks:
                del self._open[key]
                for other in under_way.there.values():
                    if other.process != process and self._world.coin():
                        event = Event(f"worker {other.process}", "transfer_broke", ())
                        self._world.schedule.after(self._world.draw(0.01), event)
