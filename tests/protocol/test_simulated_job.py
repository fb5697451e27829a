"""The simulated job is an oracle: it must notice when the machine decides wrongly."""

from collections.abc import Callable

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.protocol.messages import Resume, WorkerFenced
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import RecoveryMachine, Stage, decision
from keepstep.protocol.resume import Action, resume_step
from keepstep.protocol.roster import Roster


def recover_once(phase: Phase = Phase.BACKWARD) -> None:
    """One rank hangs and is replaced, and its fence takes a while; everything on the way is checked by the job."""
    job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, phase)
    job.withhold(job.holder(1), WorkerFenced)
    job.hang(job.holder(1))
    job.settle()
    job.release()
    job.settle()
    job.finish_well()


def resume_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "resume_step", lambda shards: (resume_step(shards) or 1) - 1)


def resume_too_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "resume_step", lambda shards: (resume_step(shards) or 0) + 1)


def everybody_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "action", lambda *_: Action.STAY)


def everybody_receives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "action", lambda *_: Action.RESTORE)


def nobody_is_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "unfenced", lambda _: [])


def resumed_before_all_have_recovered(patch: pytest.MonkeyPatch) -> None:
    def recovering(self: RecoveryMachine, holders: list[object], now_s: float) -> None:
        self._enter(Stage.TRAINING)
        self._orders.to_holders(lambda workers: Resume(workers, self.generation), "too early by far")

    patch.setattr(RecoveryMachine, "_recovering", recovering)


MUTANTS = [
    resume_too_early,
    resume_too_late,
    everybody_stays,
    everybody_receives,
    nobody_is_fenced,
    resumed_before_all_have_recovered,
]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.SYNCED, Phase.UPDATED])
def test_a_machine_that_is_right_passes(phase: Phase) -> None:
    recover_once(phase)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_machine_that_decides_wrongly_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        recover_once()


def test_the_ranks_wait_for_each_other() -> None:
    job = SimulatedJob(world_size=2).settle()
    with pytest.raises(AssertionError, match="cannot come to"):
        job.bring(rank0=(0, Phase.SYNCED))
    job.bring(rank0=(0, Phase.BACKWARD), rank1=(0, Phase.BACKWARD))
    with pytest.raises(AssertionError, match="cannot come to"):
        job.bring(rank0=(0, Phase.OPTIMIZER))
