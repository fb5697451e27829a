"""What the decision of a recovery takes from a worker's reports, and what is too old to count."""

import pytest

from keepstep.protocol.messages import NodeJoined, SafePointReached, Transfer, WorkerReady
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.decision import MAX_SOURCES, decide, reachable_step
from keepstep.protocol.recovery.roster import Roster, Worker
from keepstep.protocol.resume import Action

GENERATION = 4
ONE_SHARD = {0: "0", 1: "0"}


def ready(generation: int, reach: tuple[int, ...] = (0,), snapshots: tuple[int, ...] = ()) -> WorkerReady:
    return WorkerReady(0, generation, reach, snapshots, bool(snapshots), "0")


def safe(step: int, phase: Phase, reach: tuple[int, ...], snapshots: tuple[int, ...] = ()) -> SafePointReached:
    current = step if phase in (Phase.BACKWARD, Phase.SYNCED) else step + 1
    return SafePointReached((0,), GENERATION, step, phase, reach, current if reach else None, snapshots)


def roster_of(*reports: dict[str, SafePointReached | WorkerReady]) -> Roster:
    """Rank after rank, what the worker of each reported last."""
    roster = Roster(max(2, len(reports)), None)
    roster.add_node(NodeJoined("a", len(reports), ""))
    for rank, report in enumerate(reports):
        worker = roster.add("a", rank)
        for name, value in report.items():
            setattr(worker, name, value)
    return roster


def worker_of(roster: Roster, rank: int) -> Worker:
    return next(worker for worker in roster.holders() if worker.rank == rank)


def test_a_job_whose_ranks_were_never_all_ready_reaches_nothing() -> None:
    roster = roster_of({"safe": safe(3, Phase.BACKWARD, (3,))}, {})
    assert reachable_step(roster, {0: "0"}, GENERATION) is None
    assert reachable_step(roster, ONE_SHARD, GENERATION) == 3


def test_a_start_of_an_older_generation_counts_for_nothing() -> None:
    now, before = {"ready": ready(GENERATION)}, {"ready": ready(GENERATION - 1)}
    assert reachable_step(roster_of(now), ONE_SHARD, GENERATION) == 0
    assert reachable_step(roster_of(before), ONE_SHARD, GENERATION) is None


def test_the_safe_point_counts_and_not_what_was_said_at_the_start() -> None:
    """Checkpoints of the start may have been deleted since, and newer ones written."""
    roster = roster_of({"ready": ready(GENERATION, (0,), (2,)), "safe": safe(9, Phase.BACKWARD, (), (6, 8))})
    assert reachable_step(roster, ONE_SHARD, GENERATION) == 8
    assert decide(roster, {0: "0"}, 8, GENERATION).actions == {0: Action.REWIND}


def test_a_lost_or_finished_worker_holds_nothing() -> None:
    there = {"safe": safe(3, Phase.BACKWARD, (3,))}
    roster = roster_of(there, there)
    assert reachable_step(roster, ONE_SHARD, GENERATION) == 3
    roster.mark_lost(worker_of(roster, 0), gone=False)
    roster.mark_done(worker_of(roster, 1))
    assert reachable_step(roster, ONE_SHARD, GENERATION) is None


def test_each_replica_group_has_its_own_sources_and_receivers() -> None:
    shard_of = {0: "x", 1: "y", 2: "x", 3: "y"}
    roster = roster_of(
        {"safe": safe(3, Phase.SYNCED, (3, 4))},
        {"safe": safe(3, Phase.OPTIMIZER, (4,))},
        {"ready": ready(0, ())},
        {"safe": safe(3, Phase.SYNCED, (3, 4))},
    )
    decision = decide(roster, shard_of, 4, GENERATION)
    assert decision.step == 4
    assert decision.actions == {0: Action.ADVANCE, 1: Action.STAY, 2: Action.RESTORE, 3: Action.ADVANCE}
    assert decision.transfers == (Transfer((0,), (2,)),)


def test_nothing_moves_where_every_rank_gets_there_alone() -> None:
    roster = roster_of({"safe": safe(3, Phase.SYNCED, (3, 4))}, {"safe": safe(9, Phase.BACKWARD, (), (4,))})
    decision = decide(roster, ONE_SHARD, 4, GENERATION)
    assert decision.actions == {0: Action.ADVANCE, 1: Action.REWIND}
    assert decision.transfers == ()


def test_a_rank_that_rewinds_is_a_source_for_one_that_cannot() -> None:
    roster = roster_of({"safe": safe(9, Phase.BACKWARD, (), (4,))}, {"ready": ready(0, ())})
    assert decide(roster, ONE_SHARD, 4, GENERATION).transfers == (Transfer((0,), (1,)),)


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_the_list_of_sources_stays_short_and_that_of_receivers_is_whole(num_receivers: int) -> None:
    """The order goes to every node, and two sources fill a receiver's line; but nobody may be left out."""
    num_holders = 3 * MAX_SOURCES
    whole = [{"safe": safe(3, Phase.BACKWARD, (3,))}] * num_holders
    roster = roster_of(*[{"ready": ready(0, ())}] * num_receivers, *whole)
    shard_of = dict.fromkeys(range(num_receivers + num_holders), "0")
    (transfer,) = decide(roster, shard_of, 3, GENERATION).transfers
    assert transfer.receivers == tuple(range(num_receivers))
    assert transfer.sources == tuple(range(num_receivers, num_receivers + MAX_SOURCES))
