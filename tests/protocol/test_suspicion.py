"""Silence: whom the controller gives up, when, and what it says of those that it keeps."""

import dataclasses
from collections.abc import Callable

import pytest
from tests.protocol.simulated_job import SimulatedJob
from tests.protocol.simulated_worker import SimulatedWorker

from keepstep.protocol.deadlines import DEADLINES, LEASE_S, Deadlines
from keepstep.protocol.messages import (
    Cause,
    CheckpointWritten,
    FenceWorker,
    RanksStand,
    SafePointReached,
    SnapshotsByRank,
    StateRecovered,
    SuspicionLifted,
    Tag,
    WorkerSuspected,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import Stage
from keepstep.protocol.recovery.standstill import REPEAT_S
from keepstep.protocol.recovery.suspicion import TOGETHER_S as TOGETHER_ONSET_S
from keepstep.protocol.recovery.suspicion import Left
from keepstep.protocol.waiting.operations import Standing, WaitsFor
from keepstep.sim.cluster.layout import DEADLINES as SIMULATED

TOGETHER_S = DEADLINES.together_s


def own_shards(rank: int) -> str:
    return str(rank)


def training(world_size: int = 2, **options: object) -> SimulatedJob:
    job = SimulatedJob(world_size, num_spares=2, num_steps=50, **options)
    return job.bring_all(5, Phase.BACKWARD)


def suspect(job: SimulatedJob, worker: SimulatedWorker, snapshots: SnapshotsByRank = ()) -> None:
    """Its agent reports that the worker hangs; it does, and answers nothing any more."""
    worker.hung = True
    since_s = job.now_s - DEADLINES.hang_after_s
    tag = Tag(worker.generation, worker.step, worker.phase)
    job.say(WorkerSuspected(worker.number, Cause.HANG, "no progress", tag, since_s, snapshots))


def wait(job: SimulatedJob, seconds: float, silent_nodes: tuple[str, ...] = ()) -> None:
    """Lets the deadlines of some time come, one after the other."""
    until_s = job.now_s + seconds
    while (due_s := job.machine.next_deadline()) is not None and due_s <= until_s and not job.ended:
        job.now_s = max(job.now_s, due_s)
        job._perform(job.machine.tick(job.now_s, silent_nodes))
    job.now_s = until_s


def fenced(job: SimulatedJob) -> list[int]:
    return [order.worker for order in job.orders(FenceWorker)]


# ---- The table of deadlines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadlines", [DEADLINES, SIMULATED], ids=["defaults", "simulator"])
def test_the_deadlines_are_in_their_order(deadlines: Deadlines) -> None:
    """The agent's deadline for a phase comes before the controller's for the stage; else it blames the wrong ones."""
    durations = [getattr(deadlines, each.name) for each in dataclasses.fields(deadlines) if each.name.endswith("_s")]
    assert durations == sorted(durations)
    assert deadlines.blind_s < LEASE_S
    assert deadlines.together_s < deadlines.hang_after_s


@pytest.mark.parametrize(
    ("hang_after_s", "together_s"), [(0.1, 0.2), (1.0, 0.2), (5.0, 1.0), (60.0, 3.0), (900.0, 3.0)]
)
def test_the_wait_for_other_suspicions_is_short_beside_the_deadline(hang_after_s: float, together_s: float) -> None:
    assert Deadlines(hang_after_s=hang_after_s).together_s == pytest.approx(together_s)


def test_the_long_deadlines_are_no_shorter_than_a_timeout_of_the_scripts_groups() -> None:
    assert DEADLINES.for_timeout(600.0) == DEADLINES
    longer = DEADLINES.for_timeout(3 * 3600.0)
    assert (longer.long_s, longer.hang_after_s, longer.recover_s) == (3 * 3600.0, 60.0, DEADLINES.recover_s)
    assert longer.long_s <= longer.start_s < longer.stop_s
    assert longer.for_timeout(3600.0) == longer


def test_a_rank_with_a_checkpoint_alone_has_the_timeout_of_the_scripts_groups() -> None:
    job = training(shards=own_shards, checkpoint_every=2, timeout_s=3 * 3600.0)
    suspect(job, job.holder(1))
    job.say(CheckpointWritten(0, 4))
    wait(job, 3 * 3600.0 - DEADLINES.hang_after_s - 1.0)
    assert fenced(job) == []
    wait(job, 2.0)
    assert fenced(job) == [1]


# ---- In training ----------------------------------------------------------------------------------------------------


def test_a_rank_with_a_replica_is_given_up_after_a_short_wait_for_others() -> None:
    job = training()
    hung = job.holder(1)
    suspect(job, hung)
    assert job.machine.next_deadline() == pytest.approx(job.now_s + TOGETHER_S)
    wait(job, TOGETHER_S * 0.9)
    assert fenced(job) == []
    wait(job, TOGETHER_S * 0.2)
    assert fenced(job) == [hung.number]
    record = job.machine.records[-1]
    assert (record.cause, [each.rank for each in record.failures]) == (Cause.HANG, [1])
    assert job.settle().where == (Stage.TRAINING, 2)


def test_a_rank_that_goes_on_in_time_costs_nothing() -> None:
    job = training()
    suspect(job, job.holder(1))
    job.say(SuspicionLifted(job.holder(1).number))
    assert job.machine.next_deadline() is None
    assert (fenced(job), job.where) == ([], (Stage.TRAINING, 1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_fall_silent_together_are_all_kept(world_size: int) -> None:
    """Storage has stalled, or a scheduler has suspended the job: no rank is better than the others."""
    job = training(world_size)
    for rank in range(world_size):
        suspect(job, job.holder(rank))
    wait(job, 3 * 3600.0)
    assert (fenced(job), job.where) == ([], (Stage.TRAINING, 1))
    for rank in range(world_size):
        job.say(SuspicionLifted(job.holder(rank).number))
        job.holder(rank).hung = False
    job.finish_well()
    assert job.machine.records == []


def test_ranks_that_fall_silent_one_after_the_other_are_given_up_one_after_the_other() -> None:
    job = training(3)
    first = job.holder(0)
    suspect(job, first)
    wait(job, TOGETHER_S)
    assert fenced(job) == [first.number]
    job.bring_all(9, Phase.FORWARD)
    second = job.holder(2)
    suspect(job, second)
    wait(job, TOGETHER_S)
    assert fenced(job) == [first.number, second.number]
    assert job.settle().where == (Stage.TRAINING, 3)


# ---- Together -------------------------------------------------------------------------------------------------------


def idle(job: SimulatedJob, *ranks: int) -> None:
    """The agent reports that ranks have made no progress for a while, and do not wait for others."""
    holders = [job.holder(rank) for rank in ranks]
    standing = [Standing(each.number, each.step, each.phase, WaitsFor.NOTHING, 40.0, (), "") for each in holders]
    job.say(RanksStand(holders[0].node, job.machine.generation, tuple(standing)))


def test_of_ranks_that_fall_silent_together_none_is_given_up_though_others_have_their_state() -> None:
    """The storage of two of three ranks does not answer; the third one waits for them in a collective."""
    job = training(3)
    for rank in (0, 2):
        suspect(job, job.holder(rank))
    wait(job, 3 * 3600.0)
    assert (fenced(job), job.where) == ([], (Stage.TRAINING, 1))
    text = job.machine.standstill.published[-1]
    assert text.startswith("rank 0: no progress; ranks 0, 2 have fallen silent together")
    assert len(job.machine.standstill.published) < 3 * 3600.0 / REPEAT_S + 1
    for rank in (0, 2):
        job.say(SuspicionLifted(job.holder(rank).number))
        job.holder(rank).hung = False
    job.finish_well()
    assert job.machine.records == []


@pytest.mark.parametrize(
    ("apart_s", "phases", "are_together"),
    [
        (TOGETHER_ONSET_S, (Phase.FORWARD, Phase.BACKWARD), True),
        (TOGETHER_ONSET_S + 1.0, (Phase.FORWARD, Phase.BACKWARD), False),
        (TOGETHER_ONSET_S + 1.0, (Phase.FORWARD, Phase.FORWARD), True),
    ],
)
def test_together_is_within_five_seconds_or_in_one_phase(
    apart_s: float, phases: tuple[Phase, Phase], *, are_together: bool
) -> None:
    job = training(3)
    suspicions = job.machine._job.suspicions
    for rank in range(2):
        since_s = job.now_s - DEADLINES.hang_after_s - apart_s * (1 - rank)
        tag = Tag(1, 5, phases[rank])
        suspicions.add(WorkerSuspected(rank, Cause.HANG, "no progress", tag, since_s, ()), job.now_s)
    suspicions.compare(job.machine.roster.holders(), (), job.now_s)
    assert [each.together for each in suspicions] == [(0, 1) if are_together else ()] * 2


@pytest.mark.parametrize(("num_idle", "are_kept"), [(2, True), (3, False)])
def test_they_are_half_of_those_that_do_not_wait(num_idle: int, *, are_kept: bool) -> None:
    """Two are silent, and others stand still in code of their own, where they have half an hour."""
    job = training(6)
    idle(job, *range(2, 2 + num_idle))
    for rank in (0, 1):
        suspect(job, job.holder(rank))
    wait(job, 100.0)
    assert fenced(job) == ([] if are_kept else [0, 1])


def test_a_lone_rank_is_not_together_with_one_whose_agent_has_not_seen_it() -> None:
    """The stop took too long: the controller suspects those that it has not heard, wherever they are."""
    job = training(4)
    for rank in (2, 3):
        job.withhold(job.holder(rank), SafePointReached)
        job.holder(rank).hung = True
    job.kill(job.holder(0))
    job.settle()
    wait(job, DEADLINES.stop_s + 1.0)
    assert fenced(job) == [2, 3]


def test_when_one_of_them_goes_on_the_others_have_as_long_again() -> None:
    job = training(3)
    for rank in (0, 2):
        suspect(job, job.holder(rank))
    wait(job, 100.0)
    job.say(SuspicionLifted(job.holder(0).number))
    wait(job, DEADLINES.hang_after_s - 1.0)
    assert fenced(job) == []
    wait(job, 10.0)
    assert fenced(job) == [2]


def test_in_a_recovery_too() -> None:
    """Rank 0 is lost while ranks 2 and 3 wait for storage: their agents report them again for this generation."""
    job = training(4)
    for rank in (2, 3):
        suspect(job, job.holder(rank))
        job.withhold(job.holder(rank), SafePointReached)
    job.kill(job.holder(0))
    job.settle()
    for rank in (2, 3):
        suspect(job, job.holder(rank))
    wait(job, 1000.0)
    assert (fenced(job), job.where) == ([], (Stage.STOPPING, 2))
    for rank in (2, 3):
        job.say(SuspicionLifted(rank))
        job.holder(rank).hung = False
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


# ---- In turn --------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_silent_where_another_was_replaced_has_four_times_as_long() -> None:
    """Its storage is slow, or the script compiles there: the next one would be replaced as well, and so on."""
    job = training()
    for number in range(3):
        job.bring_all(5, Phase.BACKWARD)
        silent = job.holder(1)
        suspect(job, silent)
        wait(job, DEADLINES.hang_after_s * (4**number - 1) - 1.0 if number else 0.0)
        assert silent.number not in fenced(job)
        if number:
            assert "ranks were replaced for silence in turn" in job.machine.standstill.published[-1]
            assert "--hang-after" in job.machine.standstill.published[-1]
        wait(job, 5.0)
        assert fenced(job)[number:] == [silent.number]
        assert job.settle().where == (Stage.TRAINING, 2 + number)


def test_silence_at_another_place_is_no_reason_for_more_patience() -> None:
    job = training()
    for step in (5, 7):
        job.bring_all(step, Phase.BACKWARD)
        silent = job.holder(1)
        suspect(job, silent)
        wait(job, TOGETHER_S)
        assert fenced(job)[-1:] == [silent.number]
        job.settle()


def test_what_is_said_again_of_a_rank_that_was_given_up_is_no_reason_for_more_patience() -> None:
    """Its agent says all suspicions again when ranks stop, and may do so before the process is gone."""
    job = training()
    job.bring_all(5, Phase.BACKWARD)
    silent = job.holder(1)
    suspect(job, silent)
    wait(job, TOGETHER_S)
    assert fenced(job) == [silent.number]
    suspect(job, silent)
    job.settle()
    job.bring_all(7, Phase.BACKWARD)
    other = job.holder(1)
    suspect(job, other)
    wait(job, TOGETHER_S)
    assert fenced(job) == [silent.number, other.number]


# ---- --give-up-after ------------------------------------------------------------------------------------------------


def test_a_job_that_waits_for_silent_ranks_can_be_told_when_to_give_up() -> None:
    job = training(3, give_up_after_s=600.0)
    for rank in (0, 2):
        suspect(job, job.holder(rank))
        job.withhold(job.holder(rank), SafePointReached)
    wait(job, 600.0 - DEADLINES.hang_after_s - 1.0)
    assert job.where == (Stage.TRAINING, 1)
    wait(job, 2.0)
    assert job.where == (Stage.STOPPING, 2)
    for rank in (0, 2):
        suspect(job, job.holder(rank))
    job.settle()
    wait(job, DEADLINES.end_s + 1.0)
    assert job.ended is not None
    assert (job.ended.exit_code, fenced(job)) == (76, [])
    assert job.ended.reason.startswith("the job cannot continue: --give-up-after 600: no progress")


def test_when_one_goes_on_the_others_get_the_time_to_do_so_too() -> None:
    """Found by simulation: after SIGCONT for all, the agent of one node told of it first."""
    job = training()
    for rank in range(2):
        suspect(job, job.holder(rank))
    wait(job, 100.0)
    job.say(SuspicionLifted(job.holder(0).number))
    wait(job, TOGETHER_S * 0.9)
    assert fenced(job) == []
    wait(job, 100.0)
    assert fenced(job) == [job.workers[1].number]


@pytest.mark.parametrize(
    ("waits_for", "is_given_up"),
    [
        (WaitsFor.NOTHING, False),
        (WaitsFor.SIGNAL, False),
        (WaitsFor.READER, False),
        (WaitsFor.RANKS, True),
        (WaitsFor.CONTROLLER, True),
    ],
)
def test_a_copy_counts_only_if_its_rank_moves_or_waits_for_others(waits_for: WaitsFor, is_given_up: bool) -> None:
    """Found by simulation: the one rank that was not suspected yet hung as well, where it had half an hour."""
    job = training()
    standing = Standing(job.holder(1).number, 5, Phase.OPTIMIZER, waits_for, 40.0, (), "")
    job.say(RanksStand(job.holder(1).node, 1, (standing,)))
    hung = job.holder(0)
    suspect(job, hung)
    wait(job, 100.0)
    assert fenced(job) == ([hung.number] if is_given_up else [])


def test_the_end_of_a_suspicion_may_be_under_way_from_a_node_that_is_not_heard() -> None:
    """Found by simulation: all ranks went on at once, and the packet of one node was lost."""
    job = training(3, nodes={"a": 2, "b": 2, "c": 2}, ranks_per_node=1)
    for rank in range(3):
        suspect(job, job.holder(rank))
    job.say(SuspicionLifted(job.holder(0).number))
    assert job.machine.judges_since(job.now_s + TOGETHER_S) == job.now_s, "the other nodes must be heard after that"
    wait(job, 100.0, silent_nodes=("b", "c"))
    assert fenced(job) == []


def test_copies_on_a_node_that_is_not_heard_do_not_count() -> None:
    """Found by simulation: the report that its ranks were silent as well was on its way."""
    job = training(nodes={"a": 2, "b": 2}, ranks_per_node=1)
    suspect(job, job.holder(0))
    due_s = job.now_s + TOGETHER_S
    assert job.machine.judges_since(due_s - 0.01) is None
    assert job.machine.judges_since(due_s) == job.now_s
    wait(job, 100.0, silent_nodes=("b",))
    assert fenced(job) == []
    wait(job, 20.0)
    assert fenced(job) == [0]


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_shards_without_replica_are_given_up_if_their_snapshots_stay_in_memory(ranks: tuple[int, ...]) -> None:
    job = training(5, shards=own_shards)
    idle(job, 2, 3, 4)
    for rank in ranks:
        suspect(job, job.holder(rank), snapshots=((rank, (4, 5)),))
    wait(job, TOGETHER_S)
    assert fenced(job) == list(ranks)


@pytest.mark.parametrize("num_silent", [1, 2])
def test_a_shard_of_which_nothing_is_left_is_kept_and_explained_every_five_minutes(num_silent: int) -> None:
    job = training(shards=own_shards)
    for rank in range(num_silent):
        suspect(job, job.holder(rank))
    wait(job, 3600.0)
    assert (fenced(job), job.where) == ([], (Stage.TRAINING, 1))
    text = job.machine.standstill.published[-1]
    assert text.startswith(
        "rank 0: no progress; no other rank, snapshot or checkpoint has its state, so it is not replaced"
        if num_silent == 1
        else "rank 0: no progress; ranks 0, 1 have fallen silent together"
    )
    assert 3600.0 / (1.2 * REPEAT_S) < len(job.machine.standstill.published) < 3600.0 / (0.9 * REPEAT_S)


def test_with_a_checkpoint_alone_a_silent_rank_has_the_long_time() -> None:
    job = training(shards=own_shards, checkpoint_every=2)
    suspect(job, job.holder(1))
    job.say(CheckpointWritten(0, 4))
    wait(job, DEADLINES.long_s - DEADLINES.hang_after_s - 1.0)
    assert fenced(job) == []
    assert (
        "only a checkpoint has its state, so it is not replaced before it has been silent for 1800 s"
        in (job.machine.standstill.published[-1])
    )
    wait(job, 2.0)
    assert fenced(job) == [1]


def test_a_checkpoint_that_is_not_there_yet_is_none() -> None:
    """Found by simulation: a job that writes checkpoints had not written the first one."""
    job = training(shards=own_shards, checkpoint_every=40)
    suspect(job, job.holder(1))
    wait(job, 4 * DEADLINES.long_s)
    assert fenced(job) == []


# ---- In a recovery --------------------------------------------------------------------------------------------------


def stopping_with(shards: Callable[[int], str], world_size: int) -> tuple[SimulatedJob, SimulatedWorker]:
    """Rank 0 was killed, and the last rank, which is returned, does not stop. All others have."""
    job = training(world_size, shards=shards)
    hung = job.holder(world_size - 1)
    job.withhold(hung, SafePointReached)
    job.kill(job.holder(0))
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    suspect(job, hung)
    return job, hung


def test_a_survivor_that_does_not_stop_is_given_up_if_another_has_its_copy() -> None:
    job, hung = stopping_with(lambda rank: "0", 3)
    wait(job, TOGETHER_S)
    assert fenced(job) == [hung.number]
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


def test_the_last_copy_is_waited_for_though_it_does_not_stop() -> None:
    job, hung = stopping_with(lambda rank: "0", 2)
    wait(job, 3 * DEADLINES.stop_s)
    assert (fenced(job), job.where) == ([], (Stage.STOPPING, 2))
    assert "rank 1: no progress" in job.machine.standstill.published[-1]
    hung.hung = False
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


def test_a_rank_is_not_waited_for_when_the_state_is_lost_without_it_anyway() -> None:
    job, hung = stopping_with(own_shards, 2)
    wait(job, TOGETHER_S)
    assert fenced(job) == [hung.number]


def test_nothing_is_decided_before_all_others_have_stopped() -> None:
    job = training(3)
    hung, late = job.holder(2), job.holder(1)
    job.withhold(hung, SafePointReached)
    job.withhold(late, SafePointReached)
    job.kill(job.holder(0))
    job.settle()
    suspect(job, hung)
    wait(job, 60.0)
    assert fenced(job) == []
    job.release()
    job.withhold(hung, SafePointReached)
    job.settle()
    wait(job, 20.0)
    assert fenced(job) == [hung.number]


@pytest.mark.parametrize(("rank", "is_given_up"), [(0, False), (1, True)])
def test_while_state_moves_its_only_source_is_kept_and_a_receiver_is_not(rank: int, is_given_up: bool) -> None:
    job = training(2)
    for worker in job.workers.values():
        job.withhold(worker, StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    silent = job.holder(rank)
    suspect(job, silent)
    wait(job, TOGETHER_S)
    assert fenced(job) == ([silent.number] if is_given_up else [])


# ---- Silent nodes ---------------------------------------------------------------------------------------------------


def on_two_nodes(shards: Callable[[int], str] = lambda rank: "0") -> SimulatedJob:
    return training(nodes={"a": 2, "b": 2}, ranks_per_node=1, shards=shards)


def test_what_would_be_left_without_a_node() -> None:
    replicated, sharded = on_two_nodes(), on_two_nodes(own_shards)
    assert replicated.machine.left_without_node("b", ["b"]) is Left.MEMORY
    assert replicated.machine.left_without_node("b", ["a", "b"]) is None, "no node is better than the other"
    assert sharded.machine.left_without_node("b", ["b"]) is None, "another node may have second copies"


def test_ranks_stop_to_find_out_what_is_left_without_a_node() -> None:
    job = on_two_nodes(own_shards)
    job.withhold(job.holder(1), SafePointReached)
    job._perform(job.machine.node_silent("b", "no heartbeat for 3 s", job.now_s))
    assert job.where == (Stage.STOPPING, 2)
    assert job.machine.left_without_node("b", ["b"]) is None, "rank 0 has not said what it holds"
    job.settle()
    assert job.machine.left_without_node("b", ["b"]) is Left.NOTHING
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2), "the node is back, and nothing is lost"
