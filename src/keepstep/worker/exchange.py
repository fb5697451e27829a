"""What ranks exchange while the script starts, as one session takes part in it: it records, or it is answered."""

from __future__ import annotations

from keepstep.errors import PeerLost
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.groups.startup import Recording, Replaying
from keepstep.worker.groups.store import LinkKeeper


class StartUpExchange:
    """From `keepstep.init` to the first step: a rank keeps what its operations give it, a spare is answered with it."""

    def __init__(self, coordination: Coordination, groups: GroupRegistry) -> None:
        """Begins, before any group is made."""
        machine = coordination.machine
        self._coordination = coordination
        self._groups = groups
        self._keeper = LinkKeeper(coordination.link, lambda: machine.generation, coordination.page.set_waiting)
        self._recording = Recording(machine.rank) if machine.rank is not None else None
        replaying = Replaying(self._keeper, coordination.await_rank, lambda: machine.rank)
        groups.begin_start_up(self._recording or replaying)

    def end(self) -> None:
        """The first step is here: hands over what was recorded."""
        machine = self._coordination.machine
        self._groups.end_start_up()
        if self._recording is None or machine.generation == 0 or machine.tainted:
            return
        try:
            self._recording.hand_over(self._keeper)
        except PeerLost:
            machine.echoed()  # a rank was lost while all started: this start-up does not count
