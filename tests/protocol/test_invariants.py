"""The invariants of the controller's machine: each of them is broken by hand once, to see that it fires."""

from collections.abc import Callable

import pytest
from tests.protocol.simulated_job import NODE, SimulatedJob

from keepstep.errors import InternalError
from keepstep.protocol.messages import SafePointReached, StateRecovered, WorkerReady
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, Stage, invariants
from keepstep.protocol.recovery.records import RecoveryRecord


def held_in(stage: Stage) -> RecoveryMachine:
    job = SimulatedJob(world_size=3, num_spares=2)
    if stage is Stage.STARTING:
        job.join()
        job.withhold(job.workers[1], WorkerReady)
        return job.settle().machine
    job.bring_all(3, Phase.BACKWARD)
    held = {Stage.STOPPING: SafePointReached, Stage.RECOVERING: StateRecovered}.get(stage)
    if held is not None:
        job.withhold(job.holder(0), held)
        job.kill(job.holder(1))
    job.settle()
    assert job.machine.stage is stage
    return job.machine


def check(machine: RecoveryMachine) -> None:
    invariants.check(machine.stage, machine.generation, machine.roster, machine.records)


def holder(machine: RecoveryMachine, rank: int) -> int:
    return {worker.rank: worker.worker for worker in machine.roster.holders()}[rank]


def give_a_rank_twice(machine: RecoveryMachine) -> None:
    next(iter(machine.roster.spares())).rank = 0


def leave_the_world_above(machine: RecoveryMachine) -> None:
    next(iter(machine.roster.spares())).rank = 3


def leave_the_world_below(machine: RecoveryMachine) -> None:
    next(iter(machine.roster.spares())).rank = -1


def lose_a_rank(machine: RecoveryMachine) -> None:
    machine.roster.mark_lost(machine.roster.workers[holder(machine, 0)], gone=True)


def let_a_lost_worker_run(machine: RecoveryMachine) -> None:
    """The rank itself is held again, by a process that took it too early."""
    machine.roster.mark_lost(machine.roster.workers[holder(machine, 0)], gone=False)
    machine.roster.give_rank(next(iter(machine.roster.spares())), 0)


def forget_a_loss(machine: RecoveryMachine) -> None:
    """Its mark is set, and it stays among those that hold a rank."""
    machine.roster.workers[holder(machine, 0)].lost = True


def forget_a_lost_spare(machine: RecoveryMachine) -> None:
    next(iter(machine.roster.spares())).lost = True


def count_a_process_that_is_gone(machine: RecoveryMachine) -> None:
    spare = next(iter(machine.roster.spares()))
    machine.roster.mark_lost(spare, gone=False)
    spare.gone = True


def resume_further_back(machine: RecoveryMachine) -> None:
    machine.records += [RecoveryRecord(7, "signal", "", 0.0, resume_step=9, restored_s=1.0)]
    machine.records += [RecoveryRecord(8, "signal", "", 0.0, resume_step=8, restored_s=2.0)]


ALWAYS = [Stage.STARTING, Stage.TRAINING, Stage.STOPPING, Stage.RECOVERING]
RANKS_ARE_COUNTED = [Stage.STARTING, Stage.TRAINING]
"""Once in a recovery: before ranks may commit a step again."""
ALL_RANKS_HELD = [Stage.TRAINING, Stage.RECOVERING]

BREACHES: list[tuple[Callable[[RecoveryMachine], None], list[Stage], str]] = [
    (give_a_rank_twice, RANKS_ARE_COUNTED, "two live workers hold the same rank"),
    (leave_the_world_above, RANKS_ARE_COUNTED, "a rank outside the world of 3"),
    (leave_the_world_below, RANKS_ARE_COUNTED, "a rank outside the world of 3"),
    (forget_a_loss, RANKS_ARE_COUNTED, "the list of rank holders is not that of the workers"),
    (forget_a_lost_spare, RANKS_ARE_COUNTED, "the list of spares is wrong"),
    (count_a_process_that_is_gone, RANKS_ARE_COUNTED, "processes that are on no node or exist no more"),
    (lose_a_rank, ALL_RANKS_HELD, r"without ranks \[0\]"),
    (let_a_lost_worker_run, ALL_RANKS_HELD, "while a lost worker may still run"),
    (resume_further_back, ALWAYS, "training went back from step 9 to 8, and not to a checkpoint"),
]
CASES = [(breach, stage, what) for breach, stages, what in BREACHES for stage in stages]


@pytest.mark.parametrize("stage", ALWAYS)
def test_a_machine_that_was_driven_by_the_rules_holds_them(stage: Stage) -> None:
    check(held_in(stage))


@pytest.mark.parametrize(("breach", "stage", "what"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_each_invariant_fires(breach: Callable[[RecoveryMachine], None], stage: Stage, what: str) -> None:
    machine = held_in(stage)
    breach(machine)
    with pytest.raises(InternalError, match=rf"generation {machine.generation}, stage {stage}: .*{what}"):
        check(machine)


@pytest.mark.parametrize("breach", [lose_a_rank, let_a_lost_worker_run])
@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.STOPPING])
def test_a_rank_may_be_missing_while_all_wait_for_it(breach: Callable[[RecoveryMachine], None], stage: Stage) -> None:
    machine = held_in(stage)
    breach(machine)
    check(machine)


def test_a_decision_may_go_back_behind_one_that_was_never_carried_out() -> None:
    machine = held_in(Stage.TRAINING)
    resume_further_back(machine)
    machine.records[0].restored_s, machine.records[0].superseded = None, True
    check(machine)


def test_a_checkpoint_that_a_superseded_recovery_went_back_to_counts_once() -> None:
    machine = held_in(Stage.TRAINING)
    resume_further_back(machine)
    went_back = RecoveryRecord(7, "signal", "", 0.0, resume_step=8, actions={0: "rewind"}, superseded=True)
    machine.records.insert(1, went_back)
    check(machine)
    machine.records.append(RecoveryRecord(9, "signal", "", 0.0, resume_step=7, restored_s=3.0))
    with pytest.raises(InternalError, match="training went back from step 8 to 7"):
        check(machine)


def test_a_rank_may_be_missing_when_its_script_is_through() -> None:
    machine = held_in(Stage.TRAINING)
    machine.roster.mark_done(machine.roster.workers[0], 3)
    check(machine)


def test_a_breach_comes_out_before_a_rank_may_commit_a_step() -> None:
    machine = held_in(Stage.RECOVERING)
    give_a_rank_twice(machine)
    assert machine.generation == 2
    for number in sorted(machine.awaited)[1:]:
        machine.receive(NODE, StateRecovered((number,), 2, 0, False), 5.0)
    with pytest.raises(InternalError, match="two live workers hold the same rank"):
        machine.receive(NODE, StateRecovered((min(machine.awaited),), 2, 0, False), 5.0)
