"""One session's part in the ranks' start-up exchange: it records results, or replays recorded ones."""

from __future__ import annotations

from keepstep.errors import PeerLost
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.groups.startup_operations import OperationRecorder, OperationReplayer
from keepstep.worker.groups.store import LinkKeeper
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.startup_store import StoreRecorder, StoreReplayer


class StartUpExchange:
    """Records what a rank's operations return from `keepstep.init` to the first step, and replays it to a spare."""

    def __init__(self, coordination: Coordination, groups: GroupRegistry, store: DefaultStore) -> None:
        """Begins to record or replay. Create it before the first group and the first store operation."""
        machine = coordination.machine
        self._coordination = coordination
        self._groups = groups
        self._keeper = LinkKeeper(coordination.link, lambda: machine.generation, coordination.page.set_waiting)
        self._store = store
        self._live = store.asking
        self._recordings: list[OperationRecorder | StoreRecorder] = []
        if machine.rank is None:
            ranks = (coordination.await_rank, lambda: machine.rank)
            groups.begin_start_up(OperationReplayer(self._keeper, *ranks))
            store.asking = StoreReplayer(self._keeper, *ranks)
        else:
            operations, keys = OperationRecorder(machine.rank), StoreRecorder(machine.rank, store.asking)
            self._recordings = [operations, keys]
            groups.begin_start_up(operations)
            store.asking = keys

    def end(self) -> None:
        """Ends the exchange at the first step, and hands over the recorded results."""
        machine = self._coordination.machine
        self._groups.end_start_up()
        self._store.asking = self._live
        if machine.generation == 0 or machine.used_echo:
            return
        try:
            for recording in self._recordings:
                recording.hand_over(self._keeper)
        except PeerLost:
            machine.echoed()  # a rank was lost while all started: this start-up does not count
