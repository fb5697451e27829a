"""The machine's state of a job, shared by all stages."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.protocol.messages import Membership, MembershipChange, PassSnapshots, ReleaseSnapshots
from keepstep.protocol.recovery.end.drain import JobDrain
from keepstep.protocol.recovery.orders import Orders
from keepstep.protocol.recovery.placement.kept import KeptSnapshots, SnapshotRegister
from keepstep.protocol.recovery.placement.quarantine import Quarantine
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.processes import Processes
from keepstep.protocol.recovery.progress import Progress
from keepstep.protocol.recovery.records import RecoveryRecord
from keepstep.protocol.recovery.settings import RecoverySettings
from keepstep.protocol.recovery.standstill import Standstill


class JobState:
    """What outlives a stage. The stages read and change it; it decides nothing by itself."""

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.generation = 1
        self.quarantine = Quarantine(settings.quarantine_failures, settings.quarantine_window_s)
        self.roster = Roster(settings, self.quarantine)
        self.snapshots = SnapshotRegister()
        self.membership: Membership | None = None
        """Of the last generation in which all ranks stood ready; None while all start."""
        self.told: Membership | None = None
        """The membership that every agent was told last."""
        self.progress = Progress()
        self.standstill = Standstill(self.roster)
        self.orders = Orders()
        self.processes = Processes(settings, self.roster, self.orders)
        self.drain = JobDrain(self.roster, self.orders, settings.grace_s)
        self.connected: set[int] = set()
        """The rank holders whose groups are connected in this generation."""
        self.writes_checkpoints = False
        """Whether the scripts write checkpoints, by the last worker that came to its first step."""
        self.records: list[RecoveryRecord] = []
        self.record = RecoveryRecord(self.generation, "start", "no failure was seen", 0.0)
        """What happens in this generation. That of the first is not among ``records``: it recovers from nothing."""

    def tell(self, before: Membership, change: MembershipChange) -> Membership | MembershipChange:
        """What agents are told of the current membership, which they know from then on.

        Args:
            before: the membership that it was made of.
            change: of that one.
        """
        assert self.membership is not None
        told, self.told = self.told, self.membership
        if told is before:
            return change
        if told is None or told.world_size != self.membership.world_size:
            return self.membership
        return told.change_to(self.membership)

    def pass_snapshots(self, worker: Worker, rank: int, kept: Sequence[KeptSnapshots]) -> None:
        """Tells a worker where snapshots are in the memory of its node, of the rank that it is given or sends to."""
        others = tuple(each.worker for each in kept if each.worker != worker.worker)
        if others:
            order = PassSnapshots(worker.worker, rank, others)
            self.orders.send(worker.node, order, f"rank {rank} has snapshots in the memory there")

    def release_snapshots(self, reason: str) -> None:
        """What nodes hold of workers that are gone is needed no more."""
        for node, workers in self.snapshots.release().items():
            self.orders.send(node, ReleaseSnapshots(workers), reason)

    def explain_death(self, rank: int, cause: str, detail: str) -> None:
        """How a lost rank's process ended is known, maybe when training goes on already or the rank is lost again."""
        for record in self.records:
            if rank in record.unexplained:
                record.name_cause(rank, cause, detail)
                return

    def expect_no_explanation(self) -> None:
        """A node was lost, and with it what its agent had to tell of processes."""
        for record in self.records:
            record.unexplained.clear()

    def begin_generation(self, cause: str, detail: str, now_s: float) -> None:
        """A failure has interrupted the ranks: what they said in the last generation counts no more."""
        self.generation += 1
        self.record = RecoveryRecord(self.generation, cause, detail, now_s)
        self.connected.clear()
        self.snapshots.forget_live()
        self.standstill.clear()
        self.drain.interrupted()
        for worker in self.roster.holders():
            worker.safe = None
