"""One session's part in the ranks' start-up exchange: it records results, or replays recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.errors import PeerLost, RemoteProtocolError, UsageError
from keepstep.worker.coordination import Coordination
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.groups.startup_operations import OperationRecorder, OperationReplayer
from keepstep.worker.groups.store import LinkKeeper
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.startup_store import StoreRecorder, StoreReplayer

FIRST_STEP = "first step"
"""The name under which the first step is kept."""


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

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A context of code that only ranks run which start together. Nothing in it is recorded."""
        asking, self._store.asking = self._store.asking, self._live
        try:
            with self._groups.outside_start_up():
                yield
        finally:
            self._store.asking = asking

    def first_step(self) -> int:
        """Returns the step with which the ranks have begun that started together. Waits until all have come to it.

        Raises:
            UsageError: they have not told it: they do not call `Session.resume`.
            PeerLost: they have not come there within an hour.
        """
        value = self._keeper.kept(FIRST_STEP)
        if value is None:
            raise UsageError(
                "resume() in a replacement, but not where the job's ranks have started: call it in every process"
            )
        try:
            return int(value)
        except ValueError:
            raise RemoteProtocolError(f"a first step of {value!r:.80}") from None

    def end(self, first_step: int | None) -> None:
        """Ends the exchange at the first step, and hands over the recorded results.

        Args:
            first_step: what `Session.resume` has given; None if the script has not called it.
        """
        machine = self._coordination.machine
        self._groups.end_start_up()
        self._store.asking = self._live
        if machine.generation == 0 or machine.used_echo:
            return
        try:
            for recording in self._recordings:
                recording.hand_over(self._keeper)
            if first_step is not None and machine.rank == 0:
                self._keeper.keep(FIRST_STEP, str(first_step).encode())
        except PeerLost:
            machine.echoed()  # a rank was lost while all started: this start-up does not count
