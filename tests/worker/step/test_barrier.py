"""The gradient barrier of one rank without a job: what it waits for, and when the update may not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from tests.worker.single import NUM_STEPS, Training

from keepstep.errors import StepInterrupted
from keepstep.protocol.phases import Phase
from keepstep.worker.step.barrier import pass_gradient_barrier


class Recorded:
    """An attempt that takes note of when it is asked for what the barrier vouches for."""

    def __init__(self, training: Training, breaks: bool = False) -> None:
        self.training, self.breaks = training, breaks
        self.phases: list[Phase] = []

    def before_barrier(self) -> None:
        self.phases.append(self.training.phase())
        if self.breaks:
            self.training.link.stop(2)


def at_the_barrier(training: Training) -> None:
    training.controller.next_step(NUM_STEPS)
    training.controller.begin()
    training.model(torch.ones(8, 4)).mean().backward()


def passing(_rank: int, _size: int, moment: str, keeps: bool) -> Any:
    """The phase after the barrier and the answer; a failure comes at a moment of its own, or not at all."""
    training = Training()
    at_the_barrier(training)
    coordination = training.session._coordination
    attempt: Any = Recorded(training, breaks=moment == "before")
    decided: list[Phase] = []

    def decide() -> None:
        decided.append(training.phase())
        if not keeps:
            raise StepInterrupted

    if moment == "in":
        training.model.zero_grad()
        coordination.observe = lambda what: training.link.stop(2) if what == str(Phase.SYNCED) else None
    try:
        pass_gradient_barrier(coordination, attempt, decide)
        outcome = "passed"
    except StepInterrupted:
        outcome = "interrupted"
    return outcome, str(training.phase()), list(map(str, attempt.phases)), list(map(str, decided))


@pytest.mark.parametrize(
    ("moment", "keeps", "expected"),
    [
        ("never", True, ("passed", "optimizer", ["backward"], [])),
        ("before", True, ("interrupted", "backward", ["backward"], [])),
        ("in", True, ("passed", "optimizer", ["backward"], ["synced"])),
        ("in", False, ("interrupted", "synced", ["backward"], ["synced"])),
    ],
)
def test_the_update_runs_when_all_have_come_or_it_is_decided(moment: str, keeps: bool, expected: object) -> None:
    assert run_ranks(1, passing, moment, keeps) == [expected]
