"""The gradient barrier of one rank without a job: what it waits for, and when the update may not run."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import join, run_ranks
from tests.worker.single import NUM_STEPS, Training

from keepstep.errors import StepInterrupted, UsageError
from keepstep.protocol.messages import Member, Membership
from keepstep.protocol.phases import Phase
from keepstep.worker.step.barrier import Purpose, Votes, check_purposes, pass_gradient_barrier

VOTES = Votes(Purpose.NONE, 0, False)


def at_the_barrier(training: Training) -> None:
    training.controller.next_step(NUM_STEPS)
    training.controller.begin()
    training.model(torch.ones(8, 4)).mean().backward()


def passing(_rank: int, _size: int, moment: str, keeps: bool) -> Any:
    """The outcome, the phase after the barrier, and those in which a decision was awaited; a failure may come."""
    training = Training()
    at_the_barrier(training)
    coordination = training.session._coordination
    decided: list[Phase] = []

    def decide() -> None:
        decided.append(training.phase())
        if not keeps:
            raise StepInterrupted

    if moment == "before":
        training.link.stop(2)
    elif moment == "in":
        training.model.zero_grad()
        coordination.observe = lambda what: training.link.stop(2) if what == str(Phase.SYNCED) else None
    try:
        pass_gradient_barrier(coordination, VOTES, decide)
        outcome = "passed"
    except StepInterrupted:
        outcome = "interrupted"
    return outcome, str(training.phase()), list(map(str, decided))


@pytest.mark.parametrize(
    ("moment", "keeps", "expected"),
    [
        ("never", True, ("passed", "optimizer", [])),
        ("before", True, ("interrupted", "backward", [])),
        ("in", True, ("passed", "optimizer", ["synced"])),
        ("in", False, ("interrupted", "synced", ["synced"])),
    ],
)
def test_the_update_runs_when_all_have_come_or_it_is_decided(moment: str, keeps: bool, expected: object) -> None:
    assert run_ranks(1, passing, moment, keeps) == [expected]


# ---- what the ranks have come for -----------------------------------------------------------------------------------

TWO_STAGES = Membership.of(Member(rank, "n", str(rank // 2)) for rank in range(4))
UPDATE, END, NONE = Purpose.UPDATE, Purpose.END, Purpose.NONE


@pytest.mark.parametrize(
    "purposes",
    [
        pytest.param((UPDATE, UPDATE, UPDATE, UPDATE), id="all update"),
        pytest.param((UPDATE, UPDATE, END, END), id="a scaler of one stage skips"),
        pytest.param((UPDATE, NONE, NONE, END), id="a rank without an optimizer says nothing"),
    ],
)
def test_what_ranks_may_come_for(purposes: tuple[Purpose, ...]) -> None:
    check_purposes(20, purposes, TWO_STAGES)


def test_an_update_of_some_replicas_only_is_refused() -> None:
    with pytest.raises(UsageError, match=r"step 20: ranks \[3\] call optimizer.step\(\), and ranks \[2\] end the step"):
        check_purposes(20, (UPDATE, UPDATE, END, UPDATE), TWO_STAGES)


def voted(rank: int, size: int, path: Path, purposes: tuple[Purpose, ...]) -> Any:
    """What a rank hears in the barrier, or the error with which it leaves it."""
    _registry, world = join(path, rank, size)
    told: list[str] = []
    machine = types.SimpleNamespace(
        rank=rank, steps=types.SimpleNamespace(step=7), used_echo=False, membership=TWO_STAGES, interrupted=False
    )
    coordination: Any = types.SimpleNamespace(
        machine=machine, interrupted=False, groups=types.SimpleNamespace(world=world), reduced_behind_update=True,
        move=lambda event: told.append(str(event)), settled=lambda: None, observe=lambda _what: None,
    )  # fmt: skip
    try:
        votes = Votes(purposes[rank], every=3 * rank, is_busy=rank == 2)
        return pass_gradient_barrier(coordination, votes, lambda: told.append("decide"))
    except UsageError as error:
        return str(error)


def test_all_ranks_hear_the_greatest_of_all_votes(tmp_path: Path) -> None:
    purposes = (UPDATE, UPDATE, END, END)
    assert run_ranks(4, voted, tmp_path, purposes) == [Votes(purpose, 9, True) for purpose in purposes]


def test_all_ranks_name_those_that_come_for_something_else(tmp_path: Path) -> None:
    said = run_ranks(4, voted, tmp_path, (UPDATE, UPDATE, UPDATE, END))
    assert len(set(said)) == 1
    assert said[0].startswith("step 7: ranks [2] call optimizer.step(), and ranks [3] end the step without it")
