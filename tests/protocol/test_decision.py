"""What the decision of a recovery takes from a worker's reports, and what is too old to count."""

from keepstep.protocol.messages import Recover, SafePointReached, WorkerReady
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.decision import reachable_step, recovery_orders
from keepstep.protocol.resume import Action
from keepstep.protocol.roster import Roster, Worker

GENERATION = 4
ONE_SHARD = {0: "0", 1: "0"}


def ready(generation: int, reach: tuple[int, ...] = (0,), snapshots: tuple[int, ...] = ()) -> WorkerReady:
    return WorkerReady(0, generation, reach, snapshots, bool(snapshots), "0")


def safe(step: int, phase: Phase, reach: tuple[int, ...], snapshots: tuple[int, ...] = ()) -> SafePointReached:
    current = step if phase in (Phase.BACKWARD, Phase.SYNCED) else step + 1
    return SafePointReached(0, GENERATION, step, phase, reach, current if reach else None, snapshots)


def roster_of(*workers: Worker) -> Roster:
    return Roster(2, None, {worker.worker: worker for worker in workers}, len(workers))


def test_a_job_whose_ranks_were_never_all_ready_reaches_nothing() -> None:
    roster = roster_of(Worker(0, "a", 0, safe=safe(3, Phase.BACKWARD, (3,))), Worker(1, "a", 1))
    assert reachable_step(roster, {0: "0"}, GENERATION) is None
    assert reachable_step(roster, ONE_SHARD, GENERATION) == 3


def test_a_start_of_an_older_generation_counts_for_nothing() -> None:
    now, before = Worker(0, "a", 0, ready=ready(GENERATION)), Worker(0, "a", 0, ready=ready(GENERATION - 1))
    assert reachable_step(roster_of(now), ONE_SHARD, GENERATION) == 0
    assert reachable_step(roster_of(before), ONE_SHARD, GENERATION) is None


def test_the_safe_point_counts_and_not_what_was_said_at_the_start() -> None:
    """Checkpoints of the start may have been deleted since, and newer ones written."""
    worker = Worker(0, "a", 0, ready=ready(GENERATION, (0,), (2,)), safe=safe(9, Phase.BACKWARD, (), (6, 8)))
    assert reachable_step(roster_of(worker), ONE_SHARD, GENERATION) == 8
    ((_, order),) = recovery_orders([worker], {0: "0"}, 8, GENERATION)
    assert order.action is Action.REWIND


def test_a_lost_or_finished_worker_holds_nothing() -> None:
    there = {"safe": safe(3, Phase.BACKWARD, (3,))}
    roster = roster_of(Worker(0, "a", 0, lost=True, **there), Worker(1, "a", 1, done=True, **there))
    assert reachable_step(roster, ONE_SHARD, GENERATION) is None


def test_each_replica_group_has_its_own_sources_and_receivers() -> None:
    shard_of = {0: "x", 1: "y", 2: "x", 3: "y"}
    holders = [
        Worker(0, "a", 0, safe=safe(3, Phase.SYNCED, (3, 4))),
        Worker(1, "a", 1, safe=safe(3, Phase.OPTIMIZER, (4,))),
        Worker(7, "a", 2, ready=ready(0, ())),
        Worker(3, "a", 3, safe=safe(3, Phase.SYNCED, (3, 4))),
    ]
    orders = {order.worker: order for _, order in recovery_orders(holders, shard_of, 4, GENERATION)}
    assert orders == {
        0: Recover(0, GENERATION, 4, Action.ADVANCE, (0,), (2,)),
        7: Recover(7, GENERATION, 4, Action.RESTORE, (0,), (2,)),
        1: Recover(1, GENERATION, 4, Action.STAY, (1, 3), ()),
        3: Recover(3, GENERATION, 4, Action.ADVANCE, (1, 3), ()),
    }
