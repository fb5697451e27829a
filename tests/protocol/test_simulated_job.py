"""The simulated job is an oracle: it must notice when the machine decides wrongly."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.protocol.simulated_job import SimulatedJob

from keepstep.errors import InternalError
from keepstep.protocol import resume
from keepstep.protocol.messages import SafePointReached, Transfer, WorkerFenced
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery.placement.roster import Roster
from keepstep.protocol.recovery.stages import decision
from keepstep.protocol.recovery.stages.recovering import Recovering
from keepstep.protocol.recovery.stages.stopping import Stopping
from keepstep.protocol.resume import Action


def recover_once(phase: Phase = Phase.BACKWARD) -> None:
    """One rank hangs and is replaced, its fence and a safe point take a while; the job checks everything on the way."""
    for slow, kind in ((1, WorkerFenced), (2, SafePointReached)):
        job = SimulatedJob(world_size=3, num_spares=1).bring_all(3, phase)
        job.withhold(job.holder(slow), kind)
        job.hang(job.holder(1))
        job.settle()
        job.release()
        job.settle()
        job.finish_well()


def decide_by(
    patch: pytest.MonkeyPatch,
    common_step: Callable[..., int | None] = resume.common_step,
    action: Callable[..., Action] = resume.action,
) -> None:
    """Another rule for the machine alone: the workers keep to the right one."""
    rule = SimpleNamespace(common_step=common_step, resume_step=resume.resume_step, action=action)
    patch.setattr(decision, "resume", rule)


def resume_too_early(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, common_step=lambda reaches, **_: (resume.common_step(reaches) or 1) - 1)


def resume_too_late(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, common_step=lambda reaches, **_: (resume.common_step(reaches) or 0) + 1)


def everybody_stays(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, action=lambda *_: Action.STAY)


def everybody_receives(patch: pytest.MonkeyPatch) -> None:
    decide_by(patch, action=lambda *_: Action.RESTORE)


def no_rank_receives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decision, "Transfer", lambda sources, receivers: Transfer(sources, ()))


def no_rank_is_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "unfenced", lambda _: [])


def resumed_before_all_have_recovered(patch: pytest.MonkeyPatch) -> None:
    right = Recovering.__init__

    def init(self: Recovering, *arguments: Any) -> None:
        right(self, *arguments)
        self.awaited.clear()

    patch.setattr(Recovering, "__init__", init)


def decided_before_all_stand_still(patch: pytest.MonkeyPatch) -> None:
    right = Stopping.__init__

    def init(self: Stopping, *arguments: Any) -> None:
        right(self, *arguments)
        self.awaited = set(list(self.awaited)[:1])

    patch.setattr(Stopping, "__init__", init)


def a_process_that_is_gone_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "mark_gone", lambda _, worker: setattr(worker, "gone", True))


MUTANTS = [
    resume_too_early,
    resume_too_late,
    everybody_stays,
    everybody_receives,
    no_rank_receives,
    no_rank_is_fenced,
    resumed_before_all_have_recovered,
    decided_before_all_stand_still,
    a_process_that_is_gone_keeps_its_place,
]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.SYNCED, Phase.UPDATED])
def test_a_machine_that_is_right_passes(phase: Phase) -> None:
    recover_once(phase)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_machine_that_decides_wrongly_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, InternalError)):
        recover_once()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_machine_that_gives_up_a_good_copy_is_caught(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone is synced: the greatest step that the shard can reach is not one that rank 1 can."""
    if not is_right:
        decide_by(monkeypatch, common_step=lambda reaches, **_: None)
    job = SimulatedJob().bring_all(3, Phase.BACKWARD).bring(rank0=(3, Phase.SYNCED))
    job.kill(job.holder(2))
    if is_right:
        job.settle().finish_well()
    else:
        with pytest.raises(AssertionError, match="rank 1 is to give up a good copy"):
            job.settle()


def test_the_ranks_wait_for_each_other() -> None:
    job = SimulatedJob(world_size=2).settle()
    with pytest.raises(AssertionError, match="cannot come to"):
        job.bring(rank0=(0, Phase.SYNCED))
    job.bring(rank0=(0, Phase.BACKWARD), rank1=(0, Phase.BACKWARD))
    with pytest.raises(AssertionError, match="cannot come to"):
        job.bring(rank0=(0, Phase.OPTIMIZER))
