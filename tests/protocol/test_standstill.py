"""The controller's machine and ranks that stand still: what it tells of them, and when it ends the job."""

from __future__ import annotations

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.protocol.messages import JobStalled, RanksStand, StepsFinished, Stop
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import EXIT_FAILED, Stage
from keepstep.protocol.recovery.standstill import GRACE_S, LEAST_S, REPEAT_S
from keepstep.protocol.waiting.operations import ALL_MEMBERS, Operation, OperationCount, Standing, WaitsFor

IN_BARRIER = (OperationCount("world", Operation.BARRIER, ALL_MEMBERS, 5, 4),)
TWO_NODES = {"a": 3, "b": 2}


def standing(
    job: SimulatedJob, rank: int, step: int = 3, phase: Phase = Phase.BACKWARD, waits_for: WaitsFor = WaitsFor.RANKS
) -> Standing:
    counts = IN_BARRIER if waits_for is WaitsFor.RANKS else ()
    return Standing(job.holder(rank).number, step, phase, waits_for, 30.0, counts, "")


def stands(job: SimulatedJob, *ranks: Standing, node: str = NODE) -> None:
    job.say(RanksStand(node, job.machine.generation, ranks))


def training(nodes: dict[str, int] | None = None) -> SimulatedJob:
    size = 4 if nodes else 3
    return SimulatedJob(world_size=size, num_spares=1, nodes=nodes).bring_all(3, Phase.BACKWARD)


# ---- What is told ---------------------------------------------------------------------------------------------------


def test_ranks_that_wait_are_reported_once_and_nothing_else_happens() -> None:
    job = training()
    stands(job, standing(job, 0), standing(job, 1), standing(job, 2, waits_for=WaitsFor.NOTHING))
    known = job.machine.standstill
    assert known.text == known.published[-1]
    assert known.text == (
        "ranks 0 and 1 have been in barrier #5 of world for 30 s (backward of step 3); rank 2 has computed for 30 s "
        "(backward of step 3, in no collective)"
    )
    stands(job, standing(job, 0), standing(job, 1), standing(job, 2, waits_for=WaitsFor.NOTHING))
    job.deadline()
    assert len(known.published) == 1
    assert (job.where, job.orders(Stop), job.machine.next_deadline()) == ((Stage.TRAINING, 1), [], None)
    stands(job)
    assert (known.text, len(known.published)) == (None, 1)
    job.finish()
    assert job.ended is not None
    assert job.ended.exit_code == 0


def test_a_changed_situation_is_reported_again_but_not_more_often_than_can_be_read() -> None:
    job = training()
    stands(job, standing(job, 0))
    stands(job, standing(job, 0), standing(job, 1))
    known = job.machine.standstill
    assert len(known.published) == 1
    due = job.machine.next_deadline()
    assert due is not None
    assert due <= job.now_s + LEAST_S
    job.deadline()
    assert len(known.published) == 2
    assert known.published[-1].startswith("ranks 0 and 1 have been in barrier #5")
    assert job.machine.next_deadline() is None


def test_the_same_situation_is_reported_again_after_minutes() -> None:
    job = training()
    stands(job, standing(job, 0))
    job.now_s += REPEAT_S
    stands(job, standing(job, 0))
    assert len(job.machine.standstill.published) == 2


def test_ranks_of_which_none_waits_for_another_are_not_told_of() -> None:
    job = training()
    stands(job, *(standing(job, rank, waits_for=WaitsFor.NOTHING) for rank in range(3)))
    assert (job.machine.standstill.text, len(job.machine.standstill.published)) == (None, 0)


def test_what_several_nodes_tell_at_one_moment_is_one_sentence() -> None:
    job = training(TWO_NODES)
    on_b = [rank for rank in range(4) if job.holder(rank).node == "b"]
    on_a = [rank for rank in range(4) if rank not in on_b]
    stands(job, *(standing(job, rank) for rank in on_a), node="a")
    assert len(job.machine.standstill.published) == 0
    assert job.machine.next_deadline() == pytest.approx(job.now_s + GRACE_S)
    stands(job, *(standing(job, rank) for rank in on_b), node="b")
    job.deadline()
    assert len(job.machine.standstill.published) == 1
    assert job.machine.standstill.published[-1].startswith("ranks 0 to 3 have been in barrier #5 of world for 31 s")


def test_a_node_reports_for_its_own_ranks_only() -> None:
    job = training(TWO_NODES)
    elsewhere = next(rank for rank in range(4) if job.holder(rank).node == "b")
    unknown = Standing(77, 3, Phase.BACKWARD, WaitsFor.RANKS, 30.0, (), "")
    stands(job, standing(job, elsewhere), unknown, node="a")
    assert (job.machine.standstill.text, job.machine.next_deadline()) == (None, None)


def test_a_recovery_begins_with_nothing_told() -> None:
    job = training()
    stands(job, standing(job, 0))
    job.kill(job.holder(1))
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert job.machine.standstill.text is None
    stands(job, standing(job, 0))
    job.deadline()
    assert job.machine.standstill.text is not None
    assert len(job.machine.standstill.published) == 2


def test_a_stall_names_where_the_ranks_stood() -> None:
    job = training()
    stands(job, *(standing(job, rank) for rank in range(3)))
    job.say(JobStalled(NODE, 1, "all 3 ranks wait"))
    (record,) = job.machine.records
    assert record.detail == (
        "all 3 ranks wait: ranks 0 to 2 have been in barrier #5 of world for 30 s (backward of step 3)"
    )
    job.settle()
    job.finish_well()


def test_a_node_that_was_stalled_and_moves_again_is_not_counted_as_stalled() -> None:
    """Its ranks had waited for a slow rank of the other node. When those wait for it in turn, nothing is stuck."""
    job = training(TWO_NODES)
    stands(job, standing(job, 0), node="a")
    job.say(JobStalled("a", 1, "all ranks of a wait"))
    stands(job, node="a")
    job.say(JobStalled("b", 1, "all ranks of b wait"))
    assert (job.where, job.orders(Stop)) == ((Stage.TRAINING, 1), [])
    job.say(JobStalled("a", 1, "all ranks of a wait"))
    assert job.machine.stage is Stage.STOPPING


# ---- A recovery that waits for a node -------------------------------------------------------------------------------


def test_ranks_without_a_device_are_announced_at_once() -> None:
    job = SimulatedJob(world_size=4, num_spares=0, nodes={"a": 2, "b": 2}).bring_all(3, Phase.BACKWARD)
    on_b = [rank for rank in range(4) if job.holder(rank).node == "b"]
    assert on_b == [2, 3]
    job.lose_node("b")
    job.settle()
    assert job.where == (Stage.STOPPING, 2)
    said = (
        "ranks 2 and 3 lost: node b lost: not heard of: no device is left for ranks 2 and 3, and the job waits until "
        "nodes with 2 free devices join. If they do not within 1800 s, it ends, and what is left of its state is "
        "saved"
    )
    known = job.machine.standstill
    assert (known.text, known.published) == (said, [said])
    job.now_s += 10.0
    stands(job, node="a")
    assert (known.text, known.published) == (said, [said]), "it waits for the same as before"
    job.offer("c", 1)
    job.settle()
    assert "ranks 2 and 3" in (known.text or "")
    assert "until nodes with a free device join" in (known.text or "")
    assert len(known.published) == 2
    job.offer("b", 2)
    job.settle()
    assert job.where == (Stage.TRAINING, 2)
    assert (known.text, len(known.published)) == (None, 2)
    assert job.machine.node_news == ["node b lost: not heard of", "node b has joined again, with room for 2 workers"]
    assert job.machine.notices == []


def test_ranks_whose_processes_start_wait_for_no_node() -> None:
    job = SimulatedJob(world_size=2, num_spares=0).bring_all(3, Phase.BACKWARD)
    job.kill(job.holder(1))
    job.settle()
    assert (job.where, job.machine.standstill.published) == ((Stage.TRAINING, 2), [])


# ---- Loops that end unevenly ----------------------------------------------------------------------------------------


def ends_its_loop(job: SimulatedJob, rank: int, steps: int) -> None:
    job.say(StepsFinished((job.holder(rank).number,), job.machine.generation, steps, None))


@pytest.mark.parametrize("is_first", [True, False], ids=["it had ended before", "it ends later"])
def test_a_rank_whose_loop_ended_before_a_step_of_the_others_ends_the_job(is_first: bool) -> None:
    job = training()
    told = standing(job, 1, step=4, phase=Phase.FORWARD)
    if is_first:
        ends_its_loop(job, 0, 4)
        assert job.ended is None
        stands(job, told)
    else:
        stands(job, told)
        assert job.ended is None
        ends_its_loop(job, 0, 4)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_FAILED
    assert job.ended.reason.startswith("rank 0 ended its loop after 4 steps, and rank 1 is in step 4, which all ranks")
    assert job.machine.next_deadline() is None


@pytest.mark.parametrize(
    ("step", "phase"), [(3, Phase.SYNCED), (3, Phase.OPTIMIZER), (3, Phase.UPDATED)], ids=["barrier", "update", "after"]
)
def test_a_rank_that_is_slow_in_the_last_step_ends_nothing(step: int, phase: Phase) -> None:
    job = training()
    ends_its_loop(job, 0, 4)
    stands(job, standing(job, 1, step=step, phase=phase, waits_for=WaitsFor.NOTHING), standing(job, 2, 3, Phase.SYNCED))
    assert (job.ended, job.machine.stage) == (None, Stage.TRAINING)


def test_a_loop_that_ended_in_an_older_generation_counts_no_more() -> None:
    """After a recovery every rank says again that its loop has ended."""
    job = training()
    ends_its_loop(job, 0, 3)
    job.kill(job.holder(2))
    job.settle()
    stands(job, standing(job, 1))
    assert (job.ended, job.where) == (None, (Stage.TRAINING, 2))
