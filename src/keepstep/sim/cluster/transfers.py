"""State on its way from the ranks that hold it to those that need it, each rank's own value included.

Every rank gives its own to all others with its gradients, and keeps what it gets as a table, together with its
parameters. A replacement begins with its rank's row.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from keepstep.protocol.messages import Transfer
from keepstep.sim.cluster.schedule import Event

INCOMPLETE = -1
"""Stands in a history of updates for what is not what it should be: here for parts that do not fit together."""

if TYPE_CHECKING:
    from keepstep.sim.cluster.worker import SimulatedWorker
    from keepstep.sim.world import World


Rows = tuple[int, ...]
"""Of each rank, by rank."""

_RANK = 1 << 32
"""More than any job has steps, so that a value tells whose it is."""


def right_value(rank: int, step: int) -> int:
    """What a rank has when it stands at a step."""
    return rank * _RANK + step


class LocalValue:
    """One process's own value, and the table of all ranks' that belongs to its parameters."""

    def __init__(self) -> None:
        self.value = 0
        self.rows: Rows = ()
        self._value_before = 0
        self._rows_before: Rows = ()

    def start(self, rank: int | None) -> None:
        """The script has come to its first step, together with those of the other ranks."""
        assert rank is not None
        self.value = right_value(rank, 0)

    def begin_step(self) -> None:
        """An attempt at a step begins: it changes the value before its gradient barrier."""
        self._value_before, self._rows_before = self.value, self.rows
        self.value += 1

    def gathered(self, rows: Rows) -> None:
        """Every rank's has come, before the barrier."""
        self.rows = rows

    def undo(self) -> None:
        """The attempt is undone."""
        self.value, self.rows = self._value_before, self._rows_before

    def restored(self, rank: int | None, rows: Rows) -> None:
        """The state of another rank, or of a checkpoint, has come, with its table."""
        assert rank is not None
        self.value, self.rows = rows[rank], rows


@dataclasses.dataclass(slots=True)
class _UnderWay:
    transfer: Transfer
    there: dict[int, SimulatedWorker] = dataclasses.field(default_factory=dict)
    """rank -> its process."""


class Transfers:
    """The transfers of a recovery, one for each replica group that needs one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[tuple[int, Transfer], _UnderWay] = {}

    def come(self, worker: SimulatedWorker, generation: int, transfer: Transfer) -> None:
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
        """A process ends, or breaks its connections: whoever still waits for it waits in vain."""
        for key, under_way in list(self._open.items()):
            ranks = [rank for rank, worker in under_way.there.items() if worker.process == process]
            if ranks:
                del self._open[key]
                for other in under_way.there.values():
                    if other.process != process and self._world.coin():
                        event = Event(f"worker {other.process}", "transfer_broke", ())
                        self._world.schedule.after(self._world.draw(0.01), event)
