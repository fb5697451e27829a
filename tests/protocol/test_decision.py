"""What the decision of a recovery takes from a worker's reports, and what is too old to count."""

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.protocol.positions import (
    PHASE_OF,
    Position,
    permitted_positions,
    rests_at,
    shardings,
    standing_at,
    with_losses,
)

from keepstep.protocol.messages import Member, Membership, NodeJoined, SafePointReached, Transfer, WorkerReady
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoverySettings
from keepstep.protocol.recovery.placement.kept import SnapshotRegister
from keepstep.protocol.recovery.placement.quarantine import Quarantine
from keepstep.protocol.recovery.placement.roster import Roster, Worker
from keepstep.protocol.recovery.stages.decision import (
    MAX_SOURCES,
    decide,
    equal_in_doubt,
    is_in_doubt,
    kept_step,
    out_of_reach,
    reachable_step,
    tied_ranks,
)
from keepstep.protocol.resume import Action

GENERATION = 4


def sharded(shards: Iterable[str]) -> Membership:
    """What each rank holds."""
    return Membership.of(Member(rank, "n", shard) for rank, shard in enumerate(shards))


def ready(generation: int, reach: tuple[int, ...] = (0,), snapshots: tuple[int, ...] = ()) -> WorkerReady:
    return WorkerReady(0, generation, reach, snapshots, bool(snapshots), False, "0", 0.0)


def safe(step: int, phase: Phase, reach: tuple[int, ...], snapshots: tuple[int, ...] = ()) -> SafePointReached:
    current = step if phase in (Phase.BACKWARD, Phase.SYNCED) else step + 1
    return SafePointReached(
        (0,), GENERATION, step, phase, reach, current if reach else None, snapshots, False, (), None, None
    )


def roster_of(*reports: dict[str, SafePointReached | WorkerReady]) -> Roster:
    """Rank after rank, what the worker of each reported last."""
    roster = Roster(RecoverySettings(max(2, len(reports)), 0), Quarantine(0, 1.0))
    roster.add_node(NodeJoined("a", max(2, len(reports)), "", 0, 0, (), 0))
    for rank, report in enumerate(reports):
        worker = roster.add("a", rank)
        for name, value in report.items():
            setattr(worker, name, value)
    return roster


def worker_of(roster: Roster, rank: int) -> Worker:
    return next(worker for worker in roster.holders() if worker.rank == rank)


# ---- At which step --------------------------------------------------------------------------------------------------

BACKWARD, SYNCED = safe(3, Phase.BACKWARD, (3,)), safe(3, Phase.SYNCED, (3, 4))
OPTIMIZER, TORN = safe(3, Phase.OPTIMIZER, (4,)), safe(3, Phase.OPTIMIZER, ())
WOULD_REPEAT = msgspec.structs.replace(SYNCED, would_repeat=True)
CASES = {
    "one undoes": ([BACKWARD, SYNCED], 3),
    "one has left the barrier": ([SYNCED, OPTIMIZER], 4),
    "all are synced": ([SYNCED, SYNCED], 4),
    "a torn copy is no copy": ([TORN, SYNCED], 4),
    "a torn copy beside two": ([TORN, BACKWARD, SYNCED], 3),
    "all are torn": ([TORN, TORN], None),
    "the barrier was broken": ([BACKWARD, OPTIMIZER], 4),
    "all would repeat": ([WOULD_REPEAT, WOULD_REPEAT], 3),
    "one would repeat beside a torn one": ([WOULD_REPEAT, TORN], 3),
    "one would repeat and another has left the barrier": ([WOULD_REPEAT, OPTIMIZER], 4),
}


@pytest.mark.parametrize(("reports", "step"), CASES.values(), ids=list(CASES))
def test_all_resume_where_every_live_copy_can_be(reports: list[SafePointReached], step: int | None) -> None:
    roster = roster_of(*[{"safe": report} for report in reports])
    assert reachable_step(roster, SnapshotRegister(), sharded("0" * len(reports)), GENERATION) == step


def test_a_synced_rank_of_one_shard_does_not_leave_the_only_copy_of_another_behind() -> None:
    """Found by simulation, with more copies: who was to send the other shard's new state died before it had."""
    roster = roster_of({"safe": SYNCED}, {"safe": SYNCED}, {"ready": ready(0, ())}, {"safe": BACKWARD})
    membership = sharded("xyxy")
    step = reachable_step(roster, SnapshotRegister(), membership, GENERATION)
    assert step == 3
    decision = decide(roster, SnapshotRegister(), membership, step, GENERATION)
    assert decision.actions == {0: Action.STAY, 1: Action.STAY, 2: Action.RESTORE, 3: Action.STAY}
    assert decision.transfers == (Transfer((0,), (2,)),)


def doubted(digest: str, step: int = 3, rank_snapshots: tuple[int, ...] = ()) -> dict[str, SafePointReached]:
    return {"safe": msgspec.structs.replace(safe(step, Phase.UPDATED, (), rank_snapshots), doubt=digest)}


@pytest.mark.parametrize(
    ("shards", "said", "equal", "is_left_in_doubt"),
    [
        ("000", [doubted("a"), doubted("a"), {}], {0, 1}, True),
        ("000", [doubted("a"), doubted("b"), {}], set(), True),
        ("000", [doubted("a"), doubted("a"), doubted("b")], set(), True),
        ("000", [doubted("a"), doubted("a", step=4), {}], set(), True),
        ("00", [doubted("a"), {}], set(), True),
        ("000", [doubted("a"), doubted("a"), {"safe": OPTIMIZER}], set(), False),
        ("000", [doubted("a"), doubted("a"), {"safe": TORN}], {0, 1}, True),
        ("xxyy", [doubted("a"), doubted("a"), doubted("b"), doubted("b")], {0, 1, 2, 3}, True),
        ("xxyy", [doubted("a"), doubted("a"), doubted("a"), {}], {0, 1}, True),
        ("xxyy", [{"safe": OPTIMIZER}, doubted("a"), doubted("b"), doubted("b")], {2, 3}, True),
        ("00", [{"safe": TORN}, {}], set(), False),
    ],
)
def test_copies_in_doubt_count_if_they_are_equal_and_no_other_is_left(
    shards: str, said: list[dict[str, Any]], equal: set[int], is_left_in_doubt: bool
) -> None:
    roster = roster_of(*said)
    found = equal_in_doubt(roster, sharded(shards), GENERATION)
    assert found.keys() == {worker_of(roster, rank).worker for rank in equal}
    assert all(word == ((4,), 4, ()) for word in found.values())
    assert is_in_doubt(roster, sharded(shards), GENERATION) == is_left_in_doubt


def test_what_is_given_up_is_not_compared() -> None:
    roster = roster_of(doubted("a"), doubted("a"), doubted("b"), {"safe": OPTIMIZER})
    silent = [worker_of(roster, rank).worker for rank in (2, 3)]
    assert len(equal_in_doubt(roster, sharded("0000"), GENERATION, silent)) == 2


def test_a_shard_without_a_live_copy_takes_all_back_to_a_checkpoint() -> None:
    saved = (2,)
    torn, whole = safe(3, Phase.OPTIMIZER, (), saved), safe(3, Phase.SYNCED, (3, 4), saved)
    roster = roster_of({"safe": torn}, {"safe": whole})
    assert reachable_step(roster, SnapshotRegister(), sharded("00"), GENERATION) == 4
    assert reachable_step(roster, SnapshotRegister(), sharded("xy"), GENERATION) == 2


def register_of(**kept: tuple[int, ...]) -> SnapshotRegister:
    """What each lost rank's process has left on its node, by rank (r1=...)."""
    register = SnapshotRegister()
    for rank, steps in kept.items():
        number = int(rank[1:])
        register.left(Worker(10 + number, "a", 0, number, 1), ((number, steps),))
    return register


@pytest.mark.parametrize(
    ("position", "kept", "step"),
    [
        (BACKWARD, (2, 3), 3),
        (BACKWARD, (1, 2), 2),
        (SYNCED, (2, 3), 3),
        (OPTIMIZER, (2, 3), 3),
        (TORN, (2, 3), 3),
        (BACKWARD, (), None),
        (BACKWARD, (0,), None),
    ],
)
def test_a_lost_shard_without_a_replica_takes_all_back_to_its_snapshot(
    position: SafePointReached, kept: tuple[int, ...], step: int | None
) -> None:
    survivor = msgspec.structs.replace(position, snapshots=(2, 3) if 3 in kept else (1, 2))
    roster = roster_of({"safe": survivor})  # of a world of two: rank 1 is missing
    membership = sharded("xy")
    assert reachable_step(roster, register_of(r1=kept), membership, GENERATION) == step
    if step is None:
        return
    replacement = roster.add("a", 1)
    replacement.inherits = frozenset(kept)
    decision = decide(roster, SnapshotRegister(), membership, step, GENERATION)
    assert decision.actions[0] is (Action.STAY if step in position.reach else Action.REWIND)
    assert decision.actions[1] is Action.REWIND
    assert decision.transfers == ()


def test_replacements_that_wait_for_a_rank_are_distinguished_by_what_they_inherit() -> None:
    roster = roster_of({"safe": BACKWARD}, {}, {})
    worker_of(roster, 1).inherits = frozenset({3})
    decision = decide(roster, SnapshotRegister(), sharded("xyx"), 3, GENERATION)
    assert decision.actions == {0: Action.STAY, 1: Action.REWIND, 2: Action.RESTORE}
    assert decision.transfers == (Transfer((0,), (2,)),)


def report_of(position: Position) -> dict[str, SafePointReached | WorkerReady]:
    """What the rank says that was caught there; in the place of a lost one stands a replacement."""
    if position is None:
        return {"ready": ready(0, ())}
    step, at = position
    reach = tuple(sorted(rests_at(position)))
    return {
        "safe": SafePointReached(
            (0,), GENERATION, step, PHASE_OF[at], reach, standing_at(position), (), False, (), None, None
        )
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_in_a_first_recovery_only_replacements_receive(num_ranks: int) -> None:
    """Wherever the ranks were caught, whichever of them are lost, and whatever they hold."""
    places = {positions for joint in permitted_positions(num_ranks) for positions in with_losses(joint)}
    for sharding, positions in itertools.product(shardings(num_ranks), places):
        roster = roster_of(*map(report_of, positions))
        membership = sharded(map(str, sharding))
        held = {shard for shard, position in zip(sharding, positions, strict=True) if position is not None}
        step = reachable_step(roster, SnapshotRegister(), membership, GENERATION)
        assert (step is not None) == (held == set(sharding)), (sharding, positions)
        if step is not None:
            decision = decide(roster, SnapshotRegister(), membership, step, GENERATION)
            receivers = [rank for transfer in decision.transfers for rank in transfer.receivers]
            lost = [rank for rank, position in enumerate(positions) if position is None]
            assert sorted(receivers) == lost, (sharding, positions, decision)


# ---- What is too old to count ---------------------------------------------------------------------------------------


def test_a_job_whose_ranks_were_never_all_ready_reaches_nothing() -> None:
    roster = roster_of({"safe": safe(3, Phase.BACKWARD, (3,))}, {})
    assert reachable_step(roster, SnapshotRegister(), None, GENERATION) is None
    assert reachable_step(roster, SnapshotRegister(), sharded("00"), GENERATION) == 3


def test_a_start_of_an_older_generation_counts_for_nothing() -> None:
    now, before = {"ready": ready(GENERATION)}, {"ready": ready(GENERATION - 1)}
    assert reachable_step(roster_of(now), SnapshotRegister(), sharded("00"), GENERATION) == 0
    assert reachable_step(roster_of(before), SnapshotRegister(), sharded("00"), GENERATION) is None


def test_the_safe_point_counts_and_not_what_was_said_at_the_start() -> None:
    """Checkpoints of the start may have been deleted since, and newer ones written."""
    roster = roster_of({"ready": ready(GENERATION, (0,), (2,)), "safe": safe(9, Phase.BACKWARD, (), (6, 8))})
    assert reachable_step(roster, SnapshotRegister(), sharded("00"), GENERATION) == 8
    assert decide(roster, SnapshotRegister(), sharded("0"), 8, GENERATION).actions == {0: Action.REWIND}


def test_a_lost_or_finished_worker_holds_nothing() -> None:
    there = {"safe": safe(3, Phase.BACKWARD, (3,))}
    roster = roster_of(there, there)
    assert reachable_step(roster, SnapshotRegister(), sharded("00"), GENERATION) == 3
    roster.mark_lost(worker_of(roster, 0), gone=False)
    roster.mark_done(worker_of(roster, 1), 3)
    assert reachable_step(roster, SnapshotRegister(), sharded("00"), GENERATION) is None


# ---- Second copies --------------------------------------------------------------------------------------------------


def two_nodes(kept: dict[int, tuple[int, ...]]) -> tuple[Roster, SnapshotRegister, Membership]:
    """Ranks 0 and 1 on node a, which is lost; 2 and 3 on node b, which keep these steps of the first two's."""
    roster = Roster(RecoverySettings(4, 0), Quarantine(0, 1.0))
    for name in "ab":
        roster.add_node(NodeJoined(name, 4, name, 0, 0, (), 0))
    register = SnapshotRegister()
    for rank in range(4):
        worker = roster.add("ab"[rank // 2], rank)
        worker.ready = ready(GENERATION)
    membership = roster.membership()
    membership = Membership.of(msgspec.structs.replace(membership.member(rank), shard=str(rank)) for rank in range(4))
    for rank in (2, 3):
        worker = worker_of(roster, rank)
        copies = tuple((whose, kept[whose]) for whose in kept if whose + 2 == rank)
        worker.safe = msgspec.structs.replace(safe(5, Phase.BACKWARD, (5,), (4, 5)), second_copies=copies)
        register.keeps(worker, copies)
    roster.remove_node("a")
    register.node_lost("a")
    return roster, register, membership


def test_a_lost_nodes_ranks_are_sent_from_second_copies() -> None:
    roster, register, membership = two_nodes({0: (3, 4), 1: (4, 5)})
    assert reachable_step(roster, register, membership, GENERATION) == 4
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {}, "their buddies live: they may be anywhere"
    for rank in (0, 1):
        roster.add("b", rank)
    decision = decide(roster, register, membership, 4, GENERATION)
    assert decision.transfers == ()
    assert [(transfer, kept.worker) for transfer, kept in decision.copies] == [
        (Transfer((2,), (0,)), 2),
        (Transfer((3,), (1,)), 3),
    ]
    assert decision.actions[2] is decision.actions[3] is Action.REWIND


def test_a_replacement_that_was_sent_nothing_yet_can_still_be_sent_a_second_copy() -> None:
    """Two were to be restored, and one of them was lost: the other one stands still, and reaches nothing."""
    roster, register, membership = two_nodes({0: (3, 4), 1: (4, 5)})
    roster.add("b", 1).safe = safe(-1, Phase.STARTING, ())
    assert roster.missing_ranks() == [0]
    assert reachable_step(roster, register, membership, GENERATION) == 4
    roster.add("b", 0)
    decision = decide(roster, register, membership, 4, GENERATION)
    assert {transfer for transfer, _kept in decision.copies} == {Transfer((2,), (0,)), Transfer((3,), (1,))}


def test_a_live_rank_goes_back_to_what_another_keeps_of_it() -> None:
    """Found by simulation: a rank that was just restored has no older snapshot of its own, and the job ended."""
    roster, register, membership = two_nodes({0: (3,), 1: (3,)})
    for rank in (0, 1):
        roster.add("b", rank).safe = safe(5, Phase.BACKWARD, (5,))
    worker_of(roster, 2).safe = safe(5, Phase.OPTIMIZER, (), (3,))
    worker_of(roster, 3).safe = safe(5, Phase.BACKWARD, (5,), (3,))
    assert reachable_step(roster, register, membership, GENERATION) == 3
    decision = decide(roster, register, membership, 3, GENERATION)
    assert {rank: action for rank, action in decision.actions.items() if action is Action.RESTORE} == {
        0: Action.RESTORE,
        1: Action.RESTORE,
    }
    assert sorted(transfer.receivers for transfer, _kept in decision.copies) == [(0,), (1,)]


def test_what_a_dead_process_left_of_a_live_rank_is_as_that_rank_has_found_it() -> None:
    """Its checksum was wrong: the rank has discarded it, and can load a checkpoint."""
    roster, register, membership = two_nodes({})
    lost = worker_of(roster, 2)
    register.left(lost, ((2, (5,)),))
    roster.mark_lost(lost, gone=True)
    for rank, node in ((0, "b"), (1, "b"), (2, "b")):
        roster.add(node, rank).safe = safe(5, Phase.BACKWARD, (5,) if rank < 2 else (), (3,))
    worker_of(roster, 3).safe = safe(5, Phase.BACKWARD, (5,), (3,))
    assert reachable_step(roster, register, membership, GENERATION) == 3


def test_what_no_rank_could_send_to_a_live_one_is_not_reached() -> None:
    """Its copies are on a node where no other rank stands."""
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    roster.add("b", 1).safe = safe(-1, Phase.STARTING, ())
    register.forget(worker_of(roster, 3))
    register.left(Worker(20, "c", 0, 3, 1), ((1, (4,)),))
    assert reachable_step(roster, register, membership, GENERATION) is None


def test_a_keeper_that_is_lost_as_well_has_a_neighbour_send() -> None:
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    keeper = worker_of(roster, 2)
    register.left(keeper, ((2, (4,)), (0, (4,))))
    roster.mark_lost(keeper, gone=True)
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {2: "b"}, "its own rank's are there"
    for rank in (0, 1, 2):
        roster.add("b", rank).inherits = frozenset({4} if rank == 2 else ())
    copies = decide(roster, register, membership, 4, GENERATION).copies
    assert [(transfer, kept.worker) for transfer, kept in copies] == [
        (Transfer((2,), (0,)), keeper.worker),
        (Transfer((3,), (1,)), 3),
    ]


def test_a_copy_on_a_node_without_ranks_ties_its_rank_to_that_node() -> None:
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    for rank in (2, 3):
        keeper = worker_of(roster, rank)
        register.left(keeper, ((rank - 2, (4,)),))
        roster.mark_lost(keeper, gone=True)
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {0: "b"}, "the others follow it"


def test_a_node_without_a_device_for_the_replacement_has_another_rank_send_its_snapshot() -> None:
    """Rank 2 was on a device of node b that has failed, and its own snapshot is in the memory there."""
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    lost = worker_of(roster, 2)
    register.left(lost, ((2, (4,)), (0, (4,))))
    roster.mark_lost(lost, gone=True)
    roster.close_devices("b", (lost.device, 2, 3), "sick")
    assert not roster.takes_in("b")
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {}, "rank 3 is there, and sends it to anywhere"
    roster.add_node(NodeJoined("c", 3, "c", 0, 0, (), 0))
    for rank in (0, 1, 2):
        roster.add("c", rank)
    copies = decide(roster, register, membership, 4, GENERATION).copies
    assert {transfer for transfer, kept in copies} == {
        Transfer((3,), (0,)),
        Transfer((3,), (1,)),
        Transfer((3,), (2,)),
    }


def test_no_more_are_tied_to_a_node_than_it_takes_in() -> None:
    """The others are sent theirs by the one that comes there."""
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    for rank in (2, 3):
        keeper = worker_of(roster, rank)
        register.left(keeper, ((rank, (4,)), (rank - 2, (4,))))
        roster.mark_lost(keeper, gone=True)
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {2: "b", 3: "b"}
    roster.close_devices("b", range(3), "sick")
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {2: "b"}


def test_a_copy_that_no_process_can_come_to_does_not_count() -> None:
    """All devices of node b have failed. Its agent lives, and holds what its ranks have kept."""
    roster, register, membership = two_nodes({0: (4,), 1: (4,)})
    for rank in (2, 3):
        keeper = worker_of(roster, rank)
        register.left(keeper, ((rank, (4,)), (rank - 2, (4,))))
        roster.mark_lost(keeper, gone=True)
    roster.add_node(NodeJoined("c", 4, "c", 0, 0, (), 0))
    assert reachable_step(roster, register, membership, GENERATION) == 4
    assert out_of_reach(roster, register, membership, GENERATION) is None
    roster.close_devices("b", range(4), "sick")
    assert reachable_step(roster, register, membership, GENERATION) is None
    assert tied_ranks(roster, register, membership, 4, GENERATION) == {}
    assert out_of_reach(roster, register, membership, GENERATION) == (
        "the snapshots of ranks [0, 1, 2, 3] are in memory of b, where no rank is and none has room"
    )


def test_a_node_with_room_or_a_spare_takes_a_replacement_in() -> None:
    roster, _register, _membership = two_nodes({})
    assert roster.takes_in("b")
    assert not roster.takes_in("a"), "it is lost"
    spare = roster.add("b", None)
    roster.close_devices("b", (3,), "sick")
    assert roster.takes_in("b"), "the spare may become the replacement"
    roster.mark_lost(spare, gone=False)
    assert not roster.takes_in("b"), "its process is still there"


def test_what_must_stay_is_the_newest_step_of_which_each_shard_is_on_two_nodes() -> None:
    roster, register, membership = two_nodes({0: (3, 4), 1: (3, 4)})
    assert kept_step(roster, SnapshotRegister(), membership, GENERATION, 4) is None, "there are no second copies"
    for rank in (0, 1):
        roster.add("b", rank)
    assert kept_step(roster, register, membership, GENERATION, 9) == 4, "none is on two: at least once"
    register.left(Worker(20, "c", 0, 2, 1), ((2, (3,)), (3, (3,)), (0, (3,)), (1, (3,))))
    assert kept_step(roster, register, membership, GENERATION, 9) == 4, "of ranks 2 and 3 there is no other 3"
    for rank in (2, 3):
        found = worker_of(roster, rank).safe
        assert found is not None
        worker_of(roster, rank).safe = msgspec.structs.replace(found, snapshots=(3, 4))
    assert kept_step(roster, register, membership, GENERATION, 9) == 3
    assert kept_step(roster, register, membership, GENERATION, 2) is None


# ---- What moves to whom ---------------------------------------------------------------------------------------------


def test_each_replica_group_has_its_own_sources_and_receivers() -> None:
    membership = sharded("xyxy")
    roster = roster_of(
        {"safe": safe(3, Phase.SYNCED, (3, 4))},
        {"safe": safe(3, Phase.OPTIMIZER, (4,))},
        {"ready": ready(0, ())},
        {"safe": safe(3, Phase.SYNCED, (3, 4))},
    )
    decision = decide(roster, SnapshotRegister(), membership, 4, GENERATION)
    assert decision.step == 4
    assert decision.actions == {0: Action.ADVANCE, 1: Action.STAY, 2: Action.RESTORE, 3: Action.ADVANCE}
    assert decision.transfers == (Transfer((0,), (2,)),)


def test_nothing_moves_where_every_rank_gets_there_alone() -> None:
    roster = roster_of({"safe": safe(3, Phase.SYNCED, (3, 4))}, {"safe": safe(9, Phase.BACKWARD, (), (4,))})
    decision = decide(roster, SnapshotRegister(), sharded("00"), 4, GENERATION)
    assert decision.actions == {0: Action.ADVANCE, 1: Action.REWIND}
    assert decision.transfers == ()


def test_a_rank_that_rewinds_is_a_source_for_one_that_cannot() -> None:
    roster = roster_of({"safe": safe(9, Phase.BACKWARD, (), (4,))}, {"ready": ready(0, ())})
    assert decide(roster, SnapshotRegister(), sharded("00"), 4, GENERATION).transfers == (Transfer((0,), (1,)),)


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_the_list_of_sources_stays_short_and_that_of_receivers_is_whole(num_receivers: int) -> None:
    """The order goes to every node, and two sources fill a receiver's line; but no process may be left out."""
    num_holders = 3 * MAX_SOURCES
    whole = [{"safe": safe(3, Phase.BACKWARD, (3,))}] * num_holders
    roster = roster_of(*[{"ready": ready(0, ())}] * num_receivers, *whole)
    membership = sharded("0" * (num_receivers + num_holders))
    (transfer,) = decide(roster, SnapshotRegister(), membership, 3, GENERATION).transfers
    assert transfer.receivers == tuple(range(num_receivers))
    assert transfer.sources == tuple(range(num_receivers, num_receivers + MAX_SOURCES))
