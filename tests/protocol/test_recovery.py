"""The controller's machine: the start, one loss in each phase, shards and spares."""

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob
from tests.protocol.simulated_worker import WorkerState

from keepstep.protocol.messages import (
    Assign,
    FenceWorker,
    GroupsReset,
    Member,
    MembershipChange,
    RankAwaited,
    Recover,
    Resume,
    StartWorker,
    StateRecovered,
    Stop,
    Transfer,
    WorkerJoined,
    WorkerReady,
)
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import TRANSITIONS, Stage
from keepstep.protocol.recovery.processes import MAX_SPARE_FAILURES
from keepstep.protocol.resume import Action

IN_A_STEP = [Phase.FORWARD, Phase.BACKWARD, Phase.SYNCED, Phase.OPTIMIZER, Phase.UPDATED]


# ---- The table of stages --------------------------------------------------------------------------------------------


def test_every_stage_is_reached_from_another_and_only_the_end_is_final() -> None:
    assert set(TRANSITIONS) == set(Stage)
    assert {target for targets in TRANSITIONS.values() for target in targets} == set(Stage)
    assert [stage for stage, targets in TRANSITIONS.items() if not targets] == [Stage.ENDED]
    assert all(Stage.ENDED in targets for stage, targets in TRANSITIONS.items() if stage is not Stage.ENDED)


# ---- The start ------------------------------------------------------------------------------------------------------


def test_a_job_starts_all_ranks_and_spares_and_trains_when_all_ranks_are_ready() -> None:
    job = SimulatedJob(world_size=3, num_spares=2).settle()
    assert job.where == (Stage.TRAINING, 1)
    assert [(order.worker, order.rank) for order in job.orders(StartWorker)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, None),
        (4, None),
    ]
    assert set(job.orders(Assign)) == {Assign(rank, 1, rank, rank, 3, None, ()) for rank in range(3)}
    assert job.orders(Recover) == [Recover(1, 0, (), job.machine.membership, (), None)]
    assert job.orders(Resume) == [Resume(1)]
    assert job.handed_to(Recover) == job.handed_to(Resume) == [(0, 1, 2)]
    assert {worker.action for worker in job.workers.values() if worker.rank is not None} == {Action.STAY}
    assert job.machine.records == []
    assert job.machine.next_deadline() is None


def test_a_rank_that_is_not_ready_keeps_all_waiting_and_a_spare_does_not() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job.join()
    job.withhold(job.workers[2], WorkerJoined)
    job.withhold(job.workers[1], WorkerReady)
    job.settle()
    assert job.where == (Stage.STARTING, 1)
    assert job.orders(Recover) == []
    job._withheld.remove((1, WorkerReady))
    assert job.settle().where == (Stage.TRAINING, 1)


def test_a_job_goes_on_from_the_newest_checkpoint_of_an_earlier_one() -> None:
    job = SimulatedJob(checkpoint_every=10)
    job.checkpoints |= {5, 10}
    job.settle()
    assert job.orders(Recover) == [Recover(1, 10, (), job.machine.membership, (), None)]
    assert {job.holder(rank).action for rank in range(3)} == {Action.REWIND}
    assert job.machine.progress.trained_to == 10
    job.finish_well()


@pytest.mark.parametrize("withheld", [WorkerJoined, GroupsReset, WorkerReady, None], ids=str)
def test_a_rank_killed_in_start_up_restarts_all_ranks(withheld: type | None) -> None:
    """Wherever the others are: before they asked for their rank, connecting, building the model, ready."""
    job = SimulatedJob(world_size=3, num_spares=0)
    job.join()
    for rank in (0, 1):
        if withheld is not None:
            job.withhold(job.workers[rank], withheld)
    job.withhold(job.workers[2], WorkerReady)
    job.settle()
    job.kill(job.workers[2])
    next(job.moves(training=False))[1]()
    job.release()
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert [order.rank for order in job.orders(StartWorker)] == [0, 1, 2, 0, 1, 2]
    job.finish_well()


# ---- One loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", IN_A_STEP)
def test_a_rank_lost_in_any_phase_is_replaced_by_the_spare(phase: Phase, rank: int) -> None:
    job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, phase)
    job.kill(job.holder(rank))
    job.settle()
    step = 3 if phase in (Phase.FORWARD, Phase.BACKWARD) else 4
    survivors = {other: "advance" if phase is Phase.SYNCED else "stay" for other in range(3) if other != rank}
    (record,) = job.machine.records
    assert job.where == (Stage.TRAINING, 2)
    assert (record.resume_step, record.replacements) == (step, {rank: 3})
    assert record.actions == survivors | {rank: "restore"}
    assert record.origins() == dict.fromkeys(survivors, "own copy") | {rank: "replica"}
    assert record.steps_recomputed == 4 - step
    assert record.received_bytes > 0
    job.finish_well()


AHEAD = [
    ({0: Phase.OPTIMIZER, 1: Phase.SYNCED, 2: Phase.SYNCED}, 4),
    ({0: Phase.UPDATED, 1: Phase.OPTIMIZER, 2: Phase.SYNCED}, 4),
    ({0: Phase.SYNCED, 1: Phase.BACKWARD, 2: Phase.BACKWARD}, 3),
    ({0: Phase.SYNCED, 1: Phase.SYNCED, 2: Phase.BACKWARD}, 3),
    ({0: Phase.BACKWARD, 1: Phase.FORWARD, 2: Phase.FORWARD}, 3),
]
AHEAD_IDS = ["left barrier", "updated", "synced alone", "synced but one", "backward"]


@pytest.mark.parametrize(("places", "step"), AHEAD, ids=AHEAD_IDS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_in_different_phases_meet_where_all_can_be(places: dict[int, Phase], step: int, rank: int) -> None:
    """A rank that is synced goes on, or back, with those that live on; no process gives up a good copy."""
    job = SimulatedJob(world_size=3).bring(**{f"rank{other}": (3, phase) for other, phase in places.items()})
    job.kill(job.holder(rank))
    job.settle()
    survivors = [phase for other, phase in places.items() if other != rank]
    if set(survivors) == {Phase.SYNCED}:
        step = 4  # the one that held them back is gone
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].resume_step == step
    assert [other for other, what in job.machine.records[-1].actions.items() if what == "restore"] == [rank]
    job.finish_well()


def test_a_rank_one_step_ahead_loses_nothing() -> None:
    job = SimulatedJob(world_size=2).bring_all(3, Phase.SYNCED).bring(rank0=(4, Phase.BACKWARD))
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.records[-1].resume_step == 4
    assert job.machine.records[-1].actions == {0: "stay", 1: "restore"}
    job.finish_well()


def test_the_orders_of_a_recovery_come_in_the_order_of_the_design() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.effects.clear()
    job.hang(job.holder(1))
    job.settle()
    assert [type(effect.order) for effect in job.effects] == [FenceWorker, Stop, Assign, Recover, Resume, StartWorker]
    change = MembershipChange(((1, Member(2, NODE, "0")),))  # agents know the rest
    assert job.orders(Recover) == [Recover(2, 3, (Transfer((0,), (1,)),), change, (), None)]
    assert job.handed_to(Recover)[-1] == job.handed_to(Resume)[-1] == (0, 2)
    taken = {number: worker.action for number, worker in job.workers.items() if worker.rank is not None}
    assert taken == {0: Action.STAY, 2: Action.RESTORE}


def test_the_record_and_every_order_say_the_same_reason() -> None:
    job = SimulatedJob(world_size=2).bring_all(3, Phase.BACKWARD)
    job.effects.clear()
    job.kill(job.holder(1))
    job.settle()
    (record,) = job.machine.records
    (stop,) = [effect for effect in job.effects if isinstance(effect.order, Stop)]
    assert record.detail == stop.reason == stop.order.reason == "rank 1 lost: killed by SIGKILL"
    reasons = [effect.reason for effect in job.effects if isinstance(effect.order, Recover)]
    assert reasons == ["resume at step 3, where every shard can be"]


def test_the_record_has_all_times_in_order() -> None:
    job = SimulatedJob(world_size=2).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    job.settle().bring_all(4, Phase.FORWARD)
    (record,) = job.machine.records
    times = [record.failures[0].since_s, record.begun_s, record.stopped_s, record.decided_s, record.reset_s]
    times += [record.restored_s, record.resumed_s]
    assert times == sorted(time for time in times if time is not None)
    assert record.first_step_s == 0.1


def test_another_spare_is_started_as_soon_as_training_goes_on() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.settle()
    assert [order.rank for order in job.orders(StartWorker)[3:]] == [None]
    assert [spare.worker for spare in job.machine.roster.spares()] == [3]


def test_losses_one_after_another_are_all_recovered_from() -> None:
    job = SimulatedJob(world_size=3, num_spares=1).settle()
    for index, rank in enumerate([0, 1, 2, 0, 1]):
        job.bring_all(2 * index, IN_A_STEP[index])
        job.kill(job.holder(rank))
        job.settle()
        assert job.where == (Stage.TRAINING, index + 2)
    assert [record.resume_step for record in job.machine.records] == [0, 2, 5, 7, 9]
    job.finish_well()


def test_one_rank_alone_cannot_be_recovered_and_with_a_second_it_can() -> None:
    job = SimulatedJob(world_size=1).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 75


# ---- Shards ---------------------------------------------------------------------------------------------------------


def two_shards(rank: int) -> str:
    return "even" if rank % 2 == 0 else "odd"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_is_restored_from_its_own_replicas(rank: int) -> None:
    job = SimulatedJob(world_size=4, shards=two_shards).bring_all(3, Phase.BACKWARD)
    job.effects.clear()
    job.kill(job.holder(rank))
    job.settle()
    twin = (rank + 2) % 4
    change = MembershipChange(((rank, Member(4, NODE, ("even", "odd")[rank])),))
    assert job.orders(Recover) == [Recover(2, 3, (Transfer((twin,), (rank,)),), change, (), None)]
    assert job.machine.records[-1].actions == {0: "stay", 1: "stay", 2: "stay", 3: "stay"} | {rank: "restore"}


def test_a_shard_without_a_holder_ends_the_job_though_others_live() -> None:
    job = SimulatedJob(world_size=4, num_spares=2, shards=two_shards).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(0))
    job.kill(job.holder(2))
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 75


# ---- Spares ---------------------------------------------------------------------------------------------------------


def test_a_lost_spare_is_replaced_and_no_rank_stops() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    job.kill(job.workers[2])
    job.settle()
    assert job.where == (Stage.TRAINING, 1)
    assert (job.orders(Stop), job.machine.records) == ([], [])
    assert job.workers[3].state is WorkerState.READY
    job.finish_well()


def test_a_spare_that_never_comes_up_is_given_up_after_three_replacements() -> None:
    """The first one was warm, which says nothing about the fresh ones that follow."""
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    for _ in range(1 + 1 + MAX_SPARE_FAILURES):
        (spare,) = [worker for worker in job.workers.values() if worker.rank is None]
        job.throw(spare)
        job.withhold(spare, WorkerReady)
        while spare.number in job.workers or job.reports[spare.number]:
            next(job.moves(training=False))[1]()
        for worker in job.workers.values():
            job.withhold(worker, WorkerReady)
    assert not job.machine.roster.spares()
    assert job.where == (Stage.TRAINING, 1)
    assert len(job.orders(StartWorker)) == 3 + 1 + MAX_SPARE_FAILURES


def test_fresh_processes_that_never_come_up_end_in_a_rescue_after_three_replacements() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    for number in range(2, 3 + MAX_SPARE_FAILURES):
        while number not in job.workers:
            next(job.moves(training=False))[1]()
        job.throw(job.workers[number], "MemoryError")
    job.settle()
    assert job.ended is not None
    assert job.ended.exit_code == 76
    assert "fresh processes are lost one after the other: exit code 1: MemoryError; state saved:" in job.ended.reason
    assert len(job.orders(StartWorker)) == 2 + 1 + MAX_SPARE_FAILURES


def test_warm_spares_that_are_all_lost_are_no_reason_to_give_up() -> None:
    job = SimulatedJob(world_size=2, num_spares=5).bring_all(3, Phase.BACKWARD)
    for number in range(2, 7):
        job.kill(job.workers[number])
    job.kill(job.holder(1))
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_a_hung_spare_is_fenced_while_training_goes_on() -> None:
    job = SimulatedJob(world_size=2, num_spares=1).bring_all(3, Phase.BACKWARD)
    spare = job.workers[2]
    job.hang(spare)
    job.settle()
    assert job.where == (Stage.TRAINING, 1)
    assert [order.worker for order in job.orders(FenceWorker)] == [2]
    assert job.workers[3].state is WorkerState.READY


def test_a_spare_that_hangs_during_a_recovery_is_fenced_beside_it() -> None:
    job = SimulatedJob(world_size=2, num_spares=2).bring_all(3, Phase.BACKWARD)
    job.withhold(job.workers[2], StateRecovered)
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is Stage.RECOVERING
    job.hang(job.workers[3])
    job.settle()
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)


def test_without_a_spare_a_fresh_process_is_started_and_waited_for() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    next(job.moves(training=False))[1]()
    while job.machine.stage is Stage.STOPPING and 2 not in job.workers:
        next(job.moves(training=False))[1]()
    assert job.orders(StartWorker)[-1].rank is None
    job.withhold(job.workers[2], WorkerReady)
    job.settle()
    assert (job.where, job.machine.records[-1].resume_step) == ((Stage.STOPPING, 2), None)
    job.release()
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.records[-1].replacements == {1: 2}
    job.finish_well()


def waiting_for_a_fresh_process(num_spares: int = 0) -> SimulatedJob:
    """A job whose only spare, or none, is being started while the survivors stand."""
    job = SimulatedJob(world_size=2, num_spares=num_spares).bring_all(3, Phase.BACKWARD)
    for spare in [worker for worker in job.workers.values() if worker.rank is None]:
        job.kill(spare)
    job.kill(job.holder(1))
    while len(job.machine.roster.workers) < 3 + num_spares or 2 + num_spares not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[2 + num_spares], WorkerReady)
    return job.settle()


@pytest.mark.parametrize(
    ("fault", "num_spares"),
    [(fault, num_spares) for fault in ("kill", "throw", "quit", "hang") for num_spares in (0, 1)],
)
def test_a_fresh_process_that_is_lost_while_waited_for_is_replaced(fault: str, num_spares: int) -> None:
    job = waiting_for_a_fresh_process(num_spares)
    assert job.machine.stage is Stage.STOPPING
    getattr(job, fault)(job.workers[2 + num_spares])
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_a_spare_whose_script_awaits_a_rank_takes_one_before_it_is_ready() -> None:
    job = SimulatedJob(world_size=2, num_spares=1)
    job.join()
    spare = job.workers[2]
    job.withhold(spare, WorkerReady)
    job.bring_all(3, Phase.BACKWARD)
    job.say(RankAwaited(2))
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.RECOVERING, 2)
    assert job.machine.records[-1].replacements == {1: 2}
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    job.finish_well()


def test_a_spare_that_is_ready_is_preferred_to_one_that_only_awaits_a_rank() -> None:
    job = SimulatedJob(world_size=2, num_spares=2)
    job.join()
    job.withhold(job.workers[2], WorkerReady)
    job.bring_all(3, Phase.BACKWARD)
    job.say(RankAwaited(2))
    job.kill(job.holder(1))
    job.settle()
    assert job.machine.records[-1].replacements == {1: 3}
    job.release()
    job.settle()
    job.finish_well()


def test_a_survivor_lost_while_a_fresh_process_is_waited_for_is_replaced_too() -> None:
    job = SimulatedJob(world_size=3, num_spares=0).bring_all(3, Phase.SYNCED)
    job.kill(job.holder(1))
    while 3 not in job.workers:
        next(job.moves(training=False))[1]()
    job.withhold(job.workers[3], WorkerReady)
    job.settle()
    job.kill(job.holder(0))
    job.settle()
    job.release()
    assert job.settle().where == (Stage.TRAINING, 2)
    assert sorted(job.machine.records[-1].replacements) == [0, 1]
    job.finish_well()
