"""What ranks exchange while the script starts, as one session takes part in it: it records, or it is answered."""

from __future__ import annotations

from keepstep.errors import PeerLost
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.groups.startup import Recording, Replaying
from keepstep.worker.groups.store import LinkKeeper
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.startup import StoreRecording, StoreReplaying


class StartUpExchange:
    """From `keepstep.init` to the first step: a rank keeps what its operations give it, a spare is answered with it."""

    def __init__(self, coordination: Coordination, groups: GroupRegistry, store: DefaultStore) -> None:
        """Begins, before any group is made and any key is asked for."""
        machine = coordination.machine
        self._coordination = coordination
        self._groups = groups
        self._keeper = LinkKeeper(coordination.link, lambda: machine.generation, coordination.page.set_waiting)
        self._recording = Recording(machine.rank) if machine.rank is not None else None
        ranks = (coordination.await_rank, lambda: machine.rank)
        groups.begin_start_up(self._recording or Replaying(self._keeper, *ranks))
        self._store = store
        self._live = store.asking
        self._store_recording = StoreRecording(machine.rank, store.asking) if machine.rank is not None else None
        store.asking = self._store_recording or StoreReplaying(self._keeper, *ranks)

    def end(self) -> None:
        """The first step is here: hands over what was recorded."""
        machine = self._coordination.machine
        self._groups.end_start_up()
        self._store.asking = self._live
        if self._recording is None or self._store_recording is None or machine.generation == 0 or machine.tainted:
            return
        try:
            self._recording.hand_over(self._keeper)
            self._store_recording.hand_over(self._keeper)
        except PeerLost:
            machine.echoed()  # a rank was lost while all started: this start-up does not count
