"""What must hold of the machine's orders, as the simulated job knows it from its own processes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tests.protocol.simulated_worker import SimulatedWorker

from keepstep.protocol.messages import Recover, Resume
from keepstep.protocol.recovery import RecoveryMachine, Stage


class Oracle:
    """Fails a test as soon as an order breaks what must hold."""

    def __init__(self, machine: RecoveryMachine, shards: Callable[[int], str], has_checkpoints: bool) -> None:
        self.machine = machine
        self.shards = shards
        self.has_checkpoints = has_checkpoints
        self.decided_step = 0
        self.resume_floor = 0
        """Where training last went on: no generation resumes before it."""

    def check_decision(self, order: Recover, workers: Collection[SimulatedWorker]) -> None:
        """All stand still, no lost rank runs, no process goes back, and each receiver has a source of its own shard."""
        assert order.generation == self.machine.generation
        for worker in workers:
            assigned = worker.assignment is not None and worker.assignment.generation == order.generation
            stands = assigned or worker.reported >= order.generation
            assert worker.rank is None or stands, f"rank {worker.rank} has not come to its safe point"
        receivers: list[int] = []
        for transfer in order.transfers:
            assert transfer.sources, f"{order}: no process holds the state"
            assert transfer.receivers, f"{order}: a transfer for no process"
            involved = [*transfer.sources, *transfer.receivers]
            assert len(involved) == len(set(involved)), f"{order}: a rank sends to itself"
            assert len({self.shards(rank) for rank in involved}) == 1, f"{order}: one shard is sent to another"
            receivers += transfer.receivers
        assert len(receivers) == len(set(receivers)), f"{order}: a rank receives twice"
        for worker in workers if not self.has_checkpoints else ():
            is_good = worker.resumed > 0 and worker.parameters_at is not None
            assert not (is_good and worker.rank in receivers), f"{order}: rank {worker.rank} is to give up a good copy"
        lost = [worker for worker in self.machine.roster.workers.values() if worker.lost and worker.rank is not None]
        assert not {worker.worker for worker in lost} & {worker.number for worker in workers}, "a lost rank still runs"
        kept = [worker.parameters_at or 0 for worker in workers if worker.rank is not None]
        assert order.resume_step >= max(kept, default=0), f"{order} goes back behind a survivor: {kept}"
        if not self.has_checkpoints:
            assert order.resume_step >= self.resume_floor, f"{order} goes back behind step {self.resume_floor}"
        self.decided_step = order.resume_step

    def check_resume(self, order: Resume, workers: dict[int, SimulatedWorker]) -> None:
        """Every rank is there once, connected in this generation, with whole parameters of the resume step."""
        holders = list(self.machine.roster.holders())
        assert sorted(holder.rank for holder in holders) == list(range(self.machine.settings.world_size))
        for worker in [workers[holder.worker] for holder in holders if holder.worker in workers]:
            assert worker.generation == order.generation, f"worker {worker.number} is not connected"
            assert worker.parameters_at == self.decided_step, f"worker {worker.number} is at {worker.parameters_at}"
        assert self.machine.stage is Stage.TRAINING
        self.resume_floor = self.decided_step

    def check_action(self, worker: SimulatedWorker) -> None:
        """A rank does what the report says that it does."""
        record = self.machine.records[-1] if self.machine.records else None
        if record is not None and record.generation == worker.generation and worker.rank is not None:
            assert record.actions[worker.rank] == worker.action

    def check_stage(self, now_s: float) -> None:
        """After every event, the stage waits for something: what could go on does not wait for an unrelated event."""
        before = self.machine._stage
        assert self.machine._proceed(now_s) == [], f"{before.stage} had more to order"
        assert self.machine._stage is before, f"{before.stage} could go on to {self.machine.stage}"

    def check_books(self) -> None:
        """What the machine keeps up to date is what recounting gives, after every event."""
        roster = self.machine.roster
        live = [worker for worker in roster.workers.values() if not worker.lost and not worker.done]
        assert {worker.worker for worker in live if worker.rank is not None} == roster.holder_numbers()
        assert {worker.worker for worker in live if worker.rank is None} == {each.worker for each in roster.spares()}
        unfenced = {worker.worker for worker in roster.workers.values() if worker.lost and not worker.gone}
        assert unfenced == {worker.worker for worker in roster.unfenced()}
        for node in roster.nodes.values():
            there = {worker.worker for worker in roster.workers.values() if worker.node == node.name}
            assert node.workers.keys() == {number for number in there if not roster.workers[number].gone}
            assert len(set(node.workers.values())) == len(node.workers), "two workers on one device"
            assert set(node.workers.values()) <= set(range(node.most)), "a device that does not exist"
            assert 0 <= node.num_free <= node.slots
        assert roster.num_free == sum(node.num_free for node in roster.nodes.values())
        assert self.machine.awaited <= roster.holder_numbers(), "one that is gone is waited for"
