"""The machine's state of a job, shared by all stages."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.protocol.messages import (
    Membership,
    MembershipChange,
    PassSnapshots,
    ReleaseSnapshots,
)
from keepstep.protocol.phases import Phase
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
from keepstep.protocol.recovery.suspicion import Suspicions


class JobState:
    """The state that outlives a stage. The stages read and change it. It makes no decisions."""

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.deadlines = settings.deadlines
        """The deadlines, for the timeouts that the script has given its groups."""
        self.generation = 1
        self.quarantine = Quarantine(settings.quarantine_failures, settings.quarantine_window_s)
        self.roster = Roster(settings, self.quarantine)
        self.snapshots = SnapshotRegister()
        self.membership: Membership | None = None
        """The membership of the last generation in which all ranks were ready; None while all ranks start."""
        self.told: Membership | None = None
        """The last membership that all agents know."""
        self.progress = Progress()
        self.standstill = Standstill(self.roster)
        self.orders = Orders()
        self.notices: list[str] = []
        """Sentences for the user on what no recovery and no other record tells, oldest first."""
        self.processes = Processes(settings, self.roster, self.orders, self.notices)
        self.drain = JobDrain(self.roster, self.orders, settings.grace_s)
        self.suspicions = Suspicions(settings.deadlines, settings.give_up_after_s)
        self.gives_up: str | None = None
        """Why the job ends when its ranks have stopped; None: it goes on."""
        self.first_phases: dict[Phase, float] = {}
        """The longest first phase of each kind that a process of the job has had, in seconds."""
        self.connected: set[int] = set()
        """The rank holders whose groups are connected in this generation."""
        self.writes_checkpoints = False
        """Whether the scripts write checkpoints, by the report of the last worker that reached its first step."""
        self.resumes = False
        """Whether fresh ranks load the newest checkpoint of the script's own, or begin again; from the same report."""
        self.has_checkpoint = False
        """Whether a checkpoint is known to exist."""
        self.records: list[RecoveryRecord] = []
        self.record = RecoveryRecord(self.generation, "start", "no failure was seen", 0.0)
        """The record of this generation. That of the first is not in ``records``, because it is no recovery."""

    def tell(self, before: Membership, change: MembershipChange) -> Membership | MembershipChange:
        """Returns the membership to send to agents: the change since the last one that they know, or the complete one.

        Args:
            before: the former membership.
            change: the change from ``before`` to the current one.
        """
        assert self.membership is not None
        told, self.told = self.told, self.membership
        if told is before:
            return change
        if told is None or told.world_size != self.membership.world_size:
            return self.membership
        return told.change_to(self.membership)

    def pass_snapshots(self, worker: Worker, rank: int, kept: Sequence[KeptSnapshots]) -> None:
        """Orders the agent to give a worker access to kept snapshots of a rank, in memory of its node."""
        others = tuple(each.worker for each in kept if each.worker != worker.worker)
        if others:
            order = PassSnapshots(worker.worker, rank, others)
            self.orders.send(worker.node, order, f"rank {rank} has snapshots in the memory there")

    def release_snapshots(self, reason: str) -> None:
        """Orders the agents to free the snapshots of dead workers."""
        for node, workers in self.snapshots.release().items():
            self.orders.send(node, ReleaseSnapshots(workers), reason)

    def explain_death(self, rank: int, cause: str, detail: str) -> None:
        """Records how a lost rank's process ended, which may be known only after training has resumed."""
        for record in self.records:
            if rank in record.unexplained:
                record.name_cause(rank, cause, detail)
                return

    def expect_no_explanation(self) -> None:
        """Gives up waiting for exit statuses, because the agent that knew them may be lost with its node."""
        for record in self.records:
            record.unexplained.clear()

    def learn_timeout(self, timeout_s: float) -> None:
        """Records the timeout of a worker's groups."""
        self.deadlines = self.suspicions.deadlines = self.deadlines.for_timeout(timeout_s)

    def assign(self, worker: Worker, reason: str) -> None:
        """Orders a worker to hold its rank in this generation."""
        self.orders.assign(worker, self.generation, tuple(sorted(self.first_phases.items())), reason)

    def begin_generation(self, cause: str, detail: str, now_s: float) -> None:
        """Begins a generation after a failure. Drops the answers of the ranks in the last one."""
        self.generation += 1
        self.record = RecoveryRecord(self.generation, cause, detail, now_s)
        self.connected.clear()
        self.suspicions.clear()  # the ranks stop, and agents report again those that do not
        self.snapshots.forget_live()
        self.standstill.clear()
        self.drain.interrupted()
        for worker in self.roster.holders():
            worker.safe = None
